"""Drawn clicks, and samples that predict an event from those before it."""

from __future__ import annotations

import numpy as np

from examples.datasets import ClickOptions, LogNormalLengths, draw_clicks, split_last


def test_clicks_follow_their_probabilities_and_are_the_same_each_time() -> None:
    options = ClickOptions(num_users=400, num_items=60, lengths=LogNormalLengths(mean=30, minimum=2, maximum=200))
    clicks = draw_clicks(options)
    data = clicks.histories
    assert np.array_equal(draw_clicks(options).histories.items, data.items)
    assert len(clicks.probabilities) == len(data.items) == data.lengths.sum()
    for low in np.arange(0, 1, 0.2):
        inside = (clicks.probabilities >= low) & (clicks.probabilities < low + 0.2)
        assert abs(data.liked[inside].mean() - clicks.probabilities[inside].mean()) < 0.05
    # A user's clicks tell about the user: those of one half of a history agree with the other half's.
    half = data.offsets[:-1] + data.lengths // 2
    rates = [(data.liked[a:b].mean(), data.liked[b:c].mean())
             for a, b, c in zip(data.offsets[:-1], half, data.offsets[1:], strict=True) if b - a >= 10]  # fmt: skip
    assert np.corrcoef(np.array(rates).T)[0, 1] > 0.2


def test_last_events_are_tests_and_no_training_sample_sees_them() -> None:
    data = draw_clicks(
        ClickOptions(num_users=50, num_items=30, lengths=LogNormalLengths(mean=12, minimum=2, maximum=60))
    ).histories
    train, test = split_last(data, per_user=3, max_history=10)
    able = np.flatnonzero(data.lengths >= 3)
    assert test.users.tolist() == able.tolist()
    assert test.events.tolist() == (data.offsets[able + 1] - 1).tolist()
    assert set(train.users.tolist()) == set(able.tolist())
    assert not np.isin(train.events, test.events).any()
    assert len(np.unique(train.events)) == len(train)
    batch = train.batch([4, 0, 7])
    for place, sample in enumerate([4, 0, 7]):
        event, begin = int(train.events[sample]), int(data.offsets[train.users[sample]])
        past = data.items[max(begin, event - 10) : event]
        first = int(batch.num_history[:place].sum())
        assert batch.history[first : first + len(past)].tolist() == past.tolist()
        assert batch.candidates[place] == data.items[event]
        assert bool(batch.labels[place]) == bool(data.liked[event])
    assert batch.sample.tolist() == [4, 0, 7]
    assert train.num_history.max() == 10
