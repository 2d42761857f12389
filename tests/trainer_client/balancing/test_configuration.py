"""Options, and costs, strategies and pipelines by name, those of an installed package among them."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning import partition, strategies
from evenkeel.partitioning.registry import STRATEGIES
from evenkeel.plugins import Plugins
from trainer_client.balancing.configuration import load_configuration, read_configuration
from trainer_client.balancing.costs import _COSTS, HSTUCost, SemanticIdCost, TokenCost, cost_names
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.pipelines import PIPELINES, make_pipeline, pipeline_names

CONFIGURATION = """
cost: {name: hstu, num_layers: 8, width: 1024, num_heads: 4, head_dim: 256, history: history}
balance: {strategy: lpt, counts: free, window: 4, timeout: 1.5}
pipeline: sparse_dist
"""


def test_a_file_chooses_everything_by_name(tmp_path: Path) -> None:
    path = tmp_path / "balance.yaml"
    path.write_text(CONFIGURATION)
    found = load_configuration(path)
    assert found.cost == HSTUCost(num_layers=8, width=1024, num_heads=4, head_dim=256, history="history")
    assert (found.options.strategy, found.options.counts, found.options.window) == ("lpt", "free", 4)
    assert found.options.timeout == timedelta(seconds=1.5)
    assert found.pipeline == "sparse_dist"
    toml = tmp_path / "balance.toml"
    toml.write_text('[cost]\nname = "tokens"\ntokens = "history"\n')
    assert load_configuration(toml).cost == TokenCost(tokens="history")
    path.write_text("balance: {tolerance: 1e-3, group_timeout: 1e3}")  # text, says YAML
    found = load_configuration(path)
    assert (found.options.tolerance, found.options.group_timeout) == (1e-3, timedelta(seconds=1000))
    toml.write_text('[cost]\nname = "semantic_ids"\nnum_layers = 2\nwidth = 8\nnum_heads = 2\nitems = "history"\n')
    assert isinstance(load_configuration(toml).cost, SemanticIdCost)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cost: {name: best}", r"cost is 'best'; choose one of .*hstu, .*tokens"),
        ("cost: {tokens: x}", "cost has no name"),
        ("cost: {name: tokens, tokens: x, wide: 3}", "options of the cost 'tokens'.*wide"),
        ("balance: {strategy: best}", "strategy is 'best'; choose one of .*karmarkar_karp, lpt, minimal_move"),
        ("balance: {windows: 3}", "balance has no 'windows'; use strategy, counts"),
        ("balance: {timeout: 2s}", "timeout is '2s'; give seconds as a number"),
        ("balance: {timeout: .nan}", "timeout is nan; give seconds as a number"),
        ("balance: {memory_caps: 5}", "memory_caps is 5; give a list"),
        ("balance: {window: 4", "while parsing a flow mapping"),
        ("cost: {name: tokens, tokens: x, per_sample: 1.5}", "per_sample is 1.5"),
        ("pipeline: fast", "pipeline is 'fast'; choose one of base, .*prefetch, sparse_dist"),
        ("costs: {}", "the configuration has no 'costs'; use cost, balance, pipeline"),
        ("- cost", "the configuration is list"),
    ],
)
def test_what_is_unknown_is_told_with_what_is_known(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "balance.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"balance.yaml: .*{message}"):
        load_configuration(path)


PACKAGE = """
import numpy as np

def square(*, field):
    return lambda batch: np.asarray(batch[field]) ** 2

def by_index(problem):
    return np.arange(problem.arrays.costs.size, dtype=np.int32) % problem.num_ranks

def broken(problem):
    return np.zeros(problem.arrays.costs.size, dtype=np.int32)

def wrong(problem):
    return np.full(problem.arrays.costs.size, problem.num_ranks)

class Pipeline:
    def __init__(self, model, optimizer, device, **options):
        self.options = options
"""
ENTRY_POINTS = """
[evenkeel.costs]
square = little_package:square

[evenkeel.strategies]
by_index = little_package:by_index
broken = little_package:broken
wrong = little_package:wrong
lpt = little_package:wrong

[evenkeel.pipelines]
mine = little_package:Pipeline
"""


def test_an_installed_package_adds_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package lies in a folder of its own, as an installer leaves it, and is found by its metadata."""
    (tmp_path / "little_package.py").write_text(PACKAGE)
    metadata = tmp_path / "little_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: little-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    for kind in (STRATEGIES, PIPELINES, _COSTS):  # as a process that starts now has them
        monkeypatch.setitem(vars(kind), "installed", Plugins.installed.func(kind))
    found = read_configuration(
        {"cost": {"name": "square", "field": "n"}, "balance": {"strategy": "by_index"}, "pipeline": "mine"}
    )
    assert {"learned", "square", "tokens"} <= set(cost_names())
    assert {"by_index", "lpt", "minimal_move"} <= set(strategies())
    assert {"mine", "sparse_dist"} <= set(pipeline_names())
    assert found.cost({"n": [1, 2, 3]}).tolist() == [1, 4, 9]
    costs, homes = np.arange(8), np.repeat(np.arange(2), 4)
    assert partition(costs, homes, 2, strategy=found.options.strategy).destinations.tolist() == [0, 1] * 4
    assert partition(costs, homes, 2, strategy="lpt").loads.max() == 14  # a package does not replace what is ours
    for strategy, words in (("broken", "gave rank 0 8 samples"), ("wrong", "returned ranks 2 to 2")):
        with pytest.raises(ValueError, match=words):
            partition(costs, homes, 2, strategy=strategy)
    nothing: Any = None
    assert vars(make_pipeline("mine", nothing, nothing, nothing, depth=2)) == {"options": {"depth": 2}}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("counts", "even", "use one of equal, free"),
        ("strategy", "", "choose one of karmarkar_karp, lpt, minimal_move, plain"),
        ("tolerance", -0.1, "use a share of the lower bound, 0 to 1"),
        ("depth", 0, "use a whole number of at least 1 batch in flight"),
        ("window", 2.5, "use 1 to 64 batches"),
        ("min_samples", -1, "use a number of samples, or 0"),
        ("split", True, r"use SplitOptions\(\), or None"),
        ("learn_speeds", 1, "use True or False"),
        ("timeout", 2.0, "use a positive timedelta"),
        ("memory_caps", 5, "give a list of one number for each rank"),
        ("speeds", [1.0, float("inf")], r"speeds\[1\] is inf; use numbers from 1e-06 to 1e\+06"),
        ("memory_caps", [1.0, -1.0], r"memory_caps\[1\] is -1.0; use numbers from 0 to inf"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_remedy(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}(\[\d\])? is ") as error:
        BalanceOptions(**{field: value})
    assert re.search(words, str(error.value))
