"""Data sets: published files as their publishers write them, and drawn sequences."""

from pathlib import Path

import pytest

from examples.datasets import HistoryBatches, read_histories

KUAIRAND = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
FILES = {
    "ratings.dat": "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n",
    "ratings.csv": "userId,movieId,rating,timestamp\n7,2,3.5,1112486027\n7,29,4.0,1112484676\n9,2,1.0,1112484676\n",
    "log_standard_4_08_to_4_21_pure.csv": KUAIRAND
    + "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
    + "".join(
        f"{user},{video},20220408,1400,{time},1,0,0,0,0,0,0,9,1,0,0,0,0,1\n"
        for user, video, time in ((0, 9, 7), (0, 8, 3), (5, 9, 1))
    ),
    "loc-gowalla_totalCheckins.txt": "0\t2010-10-19T23:55:27Z\t30.2\t-97.7\t22847\n"
    "0\t2010-10-18T22:17:43Z\t30.2\t-97.7\t420315\n7\t2010-10-17T23:42:03Z\t30.2\t-97.7\t22847\n",
    "Toys.csv": "user_id,parent_asin,rating,timestamp\nA,X,3.0,2000\nA,Y,5.0,1000\nB,X,1.0,1000\n",
    "Toys.jsonl": "".join(
        f'{{"user_id": "{user}", "parent_asin": "{item}", "rating": 1.0, "timestamp": {time}}}\n'
        for user, item, time in (("A", "X", 2), ("A", "Y", 1), ("B", "X", 1))
    ),
}
FOLDERS = ("ratings", "log_")


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_read_by_user_and_time(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    data = read_histories(tmp_path if name.startswith(FOLDERS) else tmp_path / name)
    assert data.lengths.tolist() == [2, 1]
    assert data.num_items == 2
    assert data.items[0] != data.items[1]
    assert data.times[0] < data.times[1]
    batches = list(HistoryBatches(histories=data, batch_size=1, rank=0, world_size=1))
    assert sorted(int(batch.num_history.sum() + batch.num_candidates.sum()) for batch in batches) == [1, 2]


@pytest.mark.parametrize("name", FILES)
def test_files_that_end_early_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name][:-2])
    with pytest.raises(ValueError, match=name):
        read_histories(tmp_path if name.startswith(FOLDERS) else tmp_path / name)
