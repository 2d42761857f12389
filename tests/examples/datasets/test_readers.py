import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.datasets import HistoryBatches, read_kuairand, read_movielens, read_semantic_ids

RATINGS = "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n1::914::3::978301968\n"
KUAIRAND_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)


def test_movielens_1m(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text(RATINGS)
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n", encoding="latin-1")
    data = read_movielens(tmp_path)
    assert data.users.tolist() == [1, 2]
    assert data.lengths.tolist() == [3, 1]
    assert data.item_ids[data.items].tolist() == [1193, 914, 661, 1193]  # by user, then by time
    assert data.actions.tolist() == [10, 6, 6, 8]
    assert data.liked.tolist() == [True, False, False, True]
    assert data.context.tolist() == [[0, 0, 10], [1, 6, 16]]


def test_movielens_20m(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n7,2,3.5,1112486027\n7,29,4.0,1112484676\n")
    data = read_movielens(tmp_path)
    assert data.item_ids[data.items].tolist() == [29, 2]
    assert data.actions.tolist() == [8, 7]
    assert data.times.tolist() == [1112484676, 1112486027]
    assert data.context.shape == (1, 0)


def test_movielens_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither ratings\.dat"):
        read_movielens(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ratings.csv", "userId,movieId,rating\n7,2,3.5\n", "line 1: the header is 'userId,movieId,rating'; expected"),
        ("ratings.csv", "7,2,3.5,1112486027\n8,2,3.5,1112486027\n", "line 1: the header is"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n\n7,2,3.5", "line 3: '7,2,3.5' is not user, movie, rating"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n", "holds no ratings"),
        ("ratings.dat", RATINGS + "#9::1::4::978300760\n", "line 5: '#9,1,4,978300760' is not user"),
        ("ratings.dat", RATINGS + "9.5::1::4::978300760\n", "line 5: '9.5,1,4,978300760' is not user"),
        ("ratings.dat", RATINGS + "9::1::nan::978300760\n", "user 9 rated movie 1 nan; ratings are 0.5 to 5"),
        ("ratings.dat", "", "holds no ratings"),
        ("users.dat", "1::F::1::10::48067\n2::F::x::1::48067\n", "line 2: '2::F::x::1::48067' is not UserID"),
    ],
)  # fmt: skip
def test_movielens_in_another_format_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    if name == "users.dat":
        (tmp_path / "ratings.dat").write_text(RATINGS)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        read_movielens(tmp_path)


def test_line_ends_marks_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes((RATINGS + "\n").replace("\n", "\r\n").encode())
    (tmp_path / "users.dat").write_bytes(b"1::F::1::10::48067\r\n\r\n")
    data = read_movielens(tmp_path)
    assert data.lengths.tolist() == [3, 1]
    assert data.context.tolist() == [[0, 0, 10], [0, 0, 0]]
    log = (
        KUAIRAND_HEADER + _kuairand_line(0, 9, 1649397923123) + "5,9,20220408,1400,7.0,1.0,0,0,0,0,0,0,9,1,0,0,0,0,1\n"
    )
    (tmp_path / "log_standard_4_08_to_4_21_pure.csv").write_bytes(b"\xef\xbb\xbf" + log.replace("\n", "\r\n").encode())
    found = read_kuairand(tmp_path)
    assert (found.users.tolist(), found.times.tolist(), found.actions.tolist()) == ([0, 5], [1649397923123, 7], [0, 1])


def _kuairand_line(user: int, video: int, time: int, *, click: int = 0, long_view: int = 0) -> str:
    return f"{user},{video},20220408,1400,{time},{click},0,0,0,0,0,{long_view},9000,12000,0,0,0,0,1\n"


def test_kuairand_logs_in_several_parts(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "log_standard_4_08_to_4_21_1k.csv").write_text(
        KUAIRAND_HEADER + _kuairand_line(0, 4315, 1649397923123, click=1) + _kuairand_line(5, 99, 1649397923124)
    )
    (folder / "log_standard_4_22_to_5_08_1k.csv").write_text(
        KUAIRAND_HEADER + _kuairand_line(0, 77, 1650600000001, click=1, long_view=1)
    )
    (folder / "log_random_4_22_to_5_08_1k.csv").write_text(KUAIRAND_HEADER + _kuairand_line(0, 1, 1650600000000))
    (folder / "user_features_1k.csv").write_text(
        "user_id,user_active_degree,is_lowactive_period,is_live_streamer\n0,full_active,0,0\n5,high_active,0,1\n"
    )
    data = read_kuairand(tmp_path)
    assert data.users.tolist() == [0, 5]
    assert data.item_ids[data.items].tolist() == [4315, 77, 99]
    assert data.actions.tolist() == [1, 65, 0]
    assert data.times[0] == 1649397923123
    assert data.context.tolist() == [[0, 0], [1, 1]]
    assert read_kuairand(tmp_path, random_exposure=True).lengths.tolist() == [3, 1]
    assert read_kuairand(tmp_path, liked="long_view").liked.tolist() == [False, True, False]


def test_kuairand_without_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="log_standard"):
        read_kuairand(tmp_path)
    (tmp_path / "log_standard_4_08_to_4_21_pure.csv").write_text("user_id,video_id\n1,2\n")
    with pytest.raises(ValueError, match="no column time_ms, is_click"):
        read_kuairand(tmp_path)


def test_kuairand_files_that_end_early_are_refused(tmp_path: Path) -> None:
    log, features = tmp_path / "log_standard_4_08_to_4_21_pure.csv", tmp_path / "user_features_pure.csv"
    for text, message in (
        (KUAIRAND_HEADER, "hold no events"),
        (KUAIRAND_HEADER + _kuairand_line(0, 9, 7) + "5,99,2022", "pure.csv, line 3: '5,99,2022' is not a line of"),
        (KUAIRAND_HEADER + _kuairand_line(0, 9, 7).replace(",7,0", ",7,nan"), "pure.csv, line 2: .*nan"),
    ):
        log.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_kuairand(tmp_path)
    log.write_text(KUAIRAND_HEADER + _kuairand_line(0, 9, 7))
    for text in ("user_id,is_live_streamer\n0", "user_id,is_live_streamer\nx,1", "user,is_live_streamer\n0,1"):
        features.write_text(text)
        with pytest.raises(ValueError, match=r"user_features_pure\.csv, line 2: .* is not a user_id and features"):
            read_kuairand(tmp_path)


def test_semantic_ids(tmp_path: Path) -> None:
    index, interactions = tmp_path / "Beauty.index.json", tmp_path / "Beauty.inter.json"
    index.write_text(json.dumps({"0": ["<a_3>", "<b_1>"], "1": ["<a_0>", "<b_4>"], "2": ["<a_1>", "<b_0>"]}))
    interactions.write_text(json.dumps({"0": [2, 0], "1": [1]}))
    data = read_semantic_ids(index, interactions)
    assert data.codes.tolist() == [[3, 1], [0, 4], [1, 0]]
    assert data.codebook_sizes.tolist() == [4, 5]
    assert data.histories.items.tolist() == [2, 0, 1]
    assert data.tokens(data.histories.items[:2]).tolist() == [1, 4, 3, 5]
    interactions.write_text(json.dumps({"0": [9]}))
    with pytest.raises(ValueError, match=r"without codes .* for example \[9\]"):
        read_semantic_ids(index, interactions)
    for items, users, message in (
        ({"0": ["x"]}, {}, "code 'x'"),
        ({"0": [-1]}, {}, "code -1"),
        ({"0": [None]}, {}, "code None"),
        ({"0": []}, {"0": [0]}, r"items of \[0\] codes"),
        ({"B00": [1]}, {}, "has the item 'B00'; number items from 0"),
        ({"0": [1]}, {"0": []}, "holds no events"),
        ([1], {}, "no object of lists"),
    ):
        index.write_text(json.dumps(items))
        interactions.write_text(json.dumps(users))
        with pytest.raises(ValueError, match=message):
            read_semantic_ids(index, interactions)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is no JSON"):
        read_semantic_ids(index, interactions)


def test_batches_hold_each_user_once_over_all_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{user},{rng.integers(50)},{rng.integers(1, 6)}.0,{time}" for user in range(23) for time in range(user + 1)
    ]
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(lines) + "\n")
    data = read_movielens(tmp_path)
    ranks = [
        HistoryBatches(histories=data, batch_size=4, rank=rank, world_size=2, num_candidates=2, max_history=10)
        for rank in range(2)
    ]
    batches = [batch for rank in ranks for batch in rank]
    assert len(batches) == sum(len(rank) for rank in ranks)
    assert torch.cat([batch.sample for batch in batches]).sort().values.tolist() == list(range(23))
    for batch in batches:
        lengths = torch.from_numpy(data.lengths)[batch.sample]
        assert torch.equal(batch.num_candidates, lengths.clamp(max=2))
        assert torch.equal(batch.num_history, (lengths - batch.num_candidates).clamp(max=10))
        last = data.offsets[batch.sample.numpy() + 1] - 1
        ends = batch.num_candidates.cumsum(0) - 1
        assert torch.equal(batch.candidates[ends], torch.from_numpy(data.items[last]))
