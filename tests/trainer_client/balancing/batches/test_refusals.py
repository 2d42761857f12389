"""What is no batch, or ambiguous, is refused by its path, as what it is, with the remedy: one table of all refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.trainer_client.balancing.batches.helpers import OnDevice
from trainer_client.balancing.batches import BatchError, BatchSpec, MaxLength, Padded, flatten

X = torch.arange(3) + 10
LEFT = torch.tensor([[0, 0, 1], [0, 2, 3], [4, 5, 6]])  # padded on the left
COUNTS = [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1], dtype=object), ["aa", "", "a"], np.array(["aa", "", "a"])]


class Sub(torch.Tensor):
    pass


class Case(NamedTuple):
    """A value at `v` beside three samples, or a whole batch; what the message says; the declarations."""

    value: Any
    message: str
    spec: BatchSpec = BatchSpec()
    is_batch: bool = False


def jagged(values: int, *lengths: int) -> JaggedTensor:
    return JaggedTensor(torch.arange(values), lengths=torch.tensor(lengths))


def keyed(values: int, lengths: list[int], **options: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["z", "a"], torch.arange(values), lengths=torch.tensor(lengths), **options)


def deduplicated(positions: list[Any] | torch.Tensor, lengths: Any = (1, 1, 1), **options: Any) -> Any:
    inverse = list("az"), torch.as_tensor(positions)
    return keyed(3, lengths, **{"stride_per_key_per_rank": [[2], [1]], "inverse_indices": inverse} | options)


class Packed(JaggedTensor):
    """As TorchRec's modules will give it where equal rows are stored once."""

    def values(self) -> torch.Tensor:
        raise RuntimeError("no values before materialize()")


def stack(*sizes: int) -> Any:
    return lazy_stack([TensorDict({"x": torch.zeros(size)}) for size in sizes])


def rows(**declared: Any) -> BatchSpec:
    return BatchSpec(rows_per_sample=declared)


LOOP: list[Any] = [X]
LOOP.append(LOOP)
TWICE = {"x": X, "f": torch.zeros(6), "m": {"a": X}}
COUNTED = {"x": X, "n": torch.tensor([2, 0, 1]), "v": torch.zeros(3), "w": torch.zeros(3)}
VALUES = {
    "int": Case(5, r"'v' is a int \(5\); declare it in batch_size if .* in derived, with the function .* in shared if"),
    "int among objects": Case(5, "'v' is a int .*; objects names it, which is no list", BatchSpec(objects={"v"})),
    "batch in itself": Case(LOOP, "the batch holds itself"),
    "bool": Case(True, r"'v' is a bool \(True\); declare it in shared"),
    "set": Case({1, 2}, r"'v' is a set; supported are .* declare it in shared if .*, or put one for each sample in a"),
    "offsets": Case(torch.tensor([0, 1, 1, 3]), r"'v' looks like offsets, .*: give the samples' lengths instead"),
    "short list": Case(["a"], r"batch sizes disagree: 'x' holds 3 samples, 'v' 1; declare .* or shared for a value"),
    "lists": Case([["a"], torch.zeros(3)], r"batch sizes disagree: 'x' holds 3 samples, 'v.0' 1"),
    "text in a container": Case(["a", torch.zeros(3)], r"'v.0' is a str \('a'\); declare it in shared"),
    "array of no dimension": Case(np.array(1), r"'v' is a numpy\.ndarray without dimensions"),
    "masked array": Case(np.ma.masked_array([1, 2, 3], [0, 1, 0]), "'v' is a numpy.*Masked.*, which is no plain"),
    "number": Case(torch.tensor(1.0), r"'v' is a tensor without dimensions.* in derived, with the function"),
    "gradient": Case(torch.zeros(3, requires_grad=True), r"'v' requires a gradient.*v.detach\(\)"),
    "sparse": Case(torch.zeros(3, 3).to_sparse(), r"'v' is a tensor of layout torch.sparse_coo.*\.to_dense\(\)"),
    "quantized": Case(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8), "'v' is quantized"),
    "packed": Case(torch.nn.utils.rnn.pack_sequence([X]), "'v' is a torch.*PackedSequence.*pad_packed_sequence"),
    "subclass": Case(X.as_subclass(Sub), r"'v' is a .*Sub; only plain tensors.*v.as_subclass\(torch.Tensor\)"),
    "nested": Case(torch.nested.nested_tensor([torch.zeros(2)] * 3), "'v' is a nested tensor of layout torch.strided"),
    "meta": Case(torch.zeros(3, device="meta"), "'v' is a meta tensor, which has a shape but no values; make the"),
    "meta values": Case(JaggedTensor(X.to("meta"), lengths=torch.ones(3).long()), "'v' is a meta tensor"),
    "keyed tensor": Case(KeyedTensor(["a"], [2], torch.zeros(3, 2)), "'v' is a KeyedTensor, pooled embeddings.*pass "),
    "lazy stack": Case(stack(2, 2, 2), r"'v' is a lazy stack of TensorDicts.*pass v\.contiguous\(\), or .*v\.densify"),
    "variable batch": Case(
        keyed(3, [1, 1, 1], stride_per_key_per_rank=[[2], [1]]),
        "'v' is a KeyedJaggedTensor with .*: give it inverse_indices, or balance",
    ),
    "row that is not stored": Case(deduplicated([[0, 1, 0], [0, 1, 2]]), "'v' is a KeyedJaggedTensor that contradicts"),
    "row before the first": Case(deduplicated([[0, 0, 0], [0, 1, -1]]), "'v' .*; give for each key and sample in inv"),
    "rows that are no whole numbers": Case(deduplicated([[0.0, 0, 0], [0, 1, 1]]), "'v' is .* contradicts itself"),
    "rows of one key": Case(deduplicated([[0, 0, 0]]), "'v' is a KeyedJaggedTensor that contradicts itself"),
    "rows of no key": Case(deduplicated([0, 0]), "'v' is a KeyedJaggedTensor that contradicts itself"),
    "rows of another key": Case(
        deduplicated([], inverse_indices=(["z"], torch.zeros(1, 3).long())), "'v' is a KeyedJaggedTensor that contra"
    ),
    "rows without values": Case(deduplicated([[0, 0, 0], [0, 1, 1]], [1, 1, 2]), "'v' is .* contradicts itself"),
    "rows of negative length": Case(deduplicated([[0, 0, 0], [0, 1, 1]], [3, -1, 1]), "'v' is .* contradicts itself"),
    "rows without lengths": Case(deduplicated([[0, 0, 0], [0, 1, 1]], [1, 2]), "'v' is .* contradicts itself"),
    "deduplicated on a device": Case(
        deduplicated(torch.zeros(2, 3, dtype=torch.int64).as_subclass(OnDevice)), "'v' is a dedu.*; balance the host's"
    ),
    "lengths of another number": Case(keyed(5, [1] * 5, stride=3), "'v' has 5 lengths for 2 keys of 3 samples; give"),
    "packed jagged": Case(
        Packed(X, lengths=torch.ones(3).long()),
        r"'v' is a .*Packed that gives no values \(no v.*pass v.materialize\(\)",
    ),
    "too many values": Case(jagged(5, 1, 2, 0), "'v' holds 5 values, .* add up to 3; drop the values that belong to"),
    "too few values of keys": Case(keyed(5, [1] * 6), "'v' holds 5 values, .* add up to 6; values are missing"),
    "negative length": Case(jagged(1, 2, -1, 0), "sample 1 of 'v' has length -1; it must be 0 to"),
    "object": Case([1, lambda: 2, 3], "sample 1 of 'v' is a function that cannot be sent to another rank .*drop it"),
    "keys of other samples": Case(keyed(4, [1] * 4), r"'x' holds 3 samples, 'v.z' 2"),
}
BATCHES = {
    "None": Case(None, "the batch is None, which holds no samples; a loader that has no more data ends"),
    "a field that is None": Case({"a": None}, "no field with samples: all that it holds is None, shared or derived"),
    "two of one path": Case({"a.b": X, "a": {"b": X}}, "two fields have the path 'a.b'"),
    "two jagged of one path": Case({"a.b": jagged(1, 1), "a": {"b": jagged(1, 1)}}, "two jagged fields have the path"),
}
SPECS = {
    "not there": Case({"x": X}, "shared names 'y', which the batch does not have; .* x", BatchSpec(shared=["y"])),
    "no divisor": Case({"x": X}, "'x' has 3 rows, which rows_per_sample = 2 does not divide", rows(x=2)),
    "padded and flattened": Case(
        {"v": LEFT},
        "'v' is declared in rows_per_sample and in padded; declare it once",
        BatchSpec(rows_per_sample={"v": 3}, padded={"v": Padded()}),
    ),
    "no lengths": Case({"x": X / 2, "f": X}, "rows_per_sample of 'f' names 'x', which is neither a", rows(f="x")),
    "rows of jagged": Case({"j": jagged(1, 1)}, "rows_per_sample names 'j', which is no tensor", rows(j=2)),
    "size of float": Case({"n": 3.0}, "batch_size names 'n', which is float", BatchSpec(batch_size=["n"])),
    "another size": Case({"x": X, "n": 4}, "batch_size names 'n', which is 4, but .* 3", BatchSpec(batch_size=["n"])),
    "another size as a tensor": Case(
        {"x": X, "n": torch.tensor(2)}, "'n', which is 2, but .* 3", BatchSpec(batch_size=["n"])
    ),
    "objects of tensors": Case({"x": X}, "objects names 'x', which is no list, tuple or", BatchSpec(objects=["x"])),
    "twice": Case(TWICE, "'f' is declared in rows_per_sample and", BatchSpec(rows_per_sample={"f": 2}, shared=["f"])),
    "a part of what is shared": Case(
        TWICE,
        r"rows_per_sample names 'm.a', which is a part of what shared declares \('m'\)",
        BatchSpec(rows_per_sample={"f": 2, "m.a": 1}, shared=["m"]),
    ),
    "longest of nothing": Case({"x": X, "m": 3}, "derived\\['m'\\] is the", BatchSpec(derived={"m": MaxLength("q")})),
    "counts of counted": Case(COUNTED, "it is flattened by the lengths of another field itself", rows(v="n", w="v")),
    "counts that are not there": Case(COUNTED, "the batch has no field of this path", rows(v="nn", w="n")),
    "shared counts": Case(COUNTED, "it is declared in", BatchSpec(rows_per_sample={"v": "n", "w": "n"}, shared=["n"])),
    "padded row": Case({"v": X}, r"in padded, but has the shape \(3,\); give", BatchSpec(padded={"v": Padded()})),
    "padded by nothing": Case({"v": LEFT}, "padded of 'v' names 'n', which is neither", BatchSpec(padded={"v": "n"})),
    "padded too narrow": Case(
        {"v": LEFT, "n": torch.tensor([1, 5, 1])},
        "'v' is 3 wide, but sample 1 has length 5 by 'n'",
        BatchSpec(padded={"v": "n"}),
    ),
    "padded with what cannot be": Case(
        {"v": LEFT.byte()},
        r"padded\['v'\] has the value -5, which torch.uint8",
        BatchSpec(padded={"v": Padded(value=-5)}),
    ),
    "padded by another size": Case(
        {"v": LEFT, "n": torch.ones(2).long()}, "'v' holds 3 samples, 'n' 2", BatchSpec(padded={"v": "n"})
    ),
    "padded array": Case({"v": LEFT.numpy()}, "in padded, which is for tensors", BatchSpec(padded={"v": Padded()})),
    "padded list": Case({"v": ["a"]}, "padded names 'v', which is no dense", BatchSpec(padded={"v": Padded()})),
    "padded on the other side": Case(
        {"v": LEFT, "n": torch.tensor([1, 2, 3])},
        r"padded\['v'\] would cut values off: .* sample 0 .* position 2 .*Padded\(lengths='n', side='left'\)",
        BatchSpec(padded={"v": "n"}),
    ),
    "padded on the other side with all that is cut off alike": Case(
        {"v": torch.tensor([[0, 7, 8, 9], [3, 4, 5, 9]]), "n": torch.tensor([3, 4])},
        r"sample 0 has 9 at position 3 instead of the padding 0; .*'left'\).*, Padded\(lengths='n', value=9\) if it",
        BatchSpec(padded={"v": "n"}),
    ),
    **{
        f"{name} by {type(counts).__name__} {index}": Case(
            {"x": X, "n": counts, "t": torch.zeros(3, 40), "m": 2},
            r"'n', which is neither .*: it is a list or array of Python objects; make it a tensor",
            spec,
        )
        for index, counts in enumerate(COUNTS)
        for name, spec in {
            "rows": BatchSpec(rows_per_sample={"t": "n"}, shared=["m"]),
            "padded": BatchSpec(padded={"t": Padded(lengths="n")}, shared=["m"]),
            "derived": BatchSpec(derived={"m": MaxLength("n")}),
        }.items()
    },
    **{
        f"rows by {counts.dtype}{list(counts.shape)}": Case(
            {"x": X, "n": counts, "v": torch.zeros(3)}, message, rows(v="n")
        )
        for counts, message in [
            (torch.tensor([2, 0, 1], dtype=torch.int8), r"it is of int8 and shape \(3,\); convert it"),
            (torch.tensor([[2], [0], [1]]), r"it is of int64 and shape \(3, 1\); convert it"),
            (torch.tensor([2.0, 0.0, 1.0]), r"it is of float32 and shape"),
        ]
    },
}
CASES = VALUES | {name: case._replace(is_batch=True) for name, case in (BATCHES | SPECS).items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_batch_is_named_with_its_remedy(name: str) -> None:
    case = CASES[name]
    batch = case.value if case.is_batch else {"x": X, "v": case.value}
    for _ in range(2):  # also after a batch that can be read
        with pytest.raises(BatchError, match=f"(?s){case.message}"):
            flatten(batch, case.spec)
        flatten({"x": X, "v": torch.zeros(3)}, BatchSpec())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"shared": "x"}, "shared is 'x'; give a collection"),
        ({"objects": {"t": 1}}, "objects is {'t': 1}; give a collection"),
        ({"rows_per_sample": {"x": 0}}, "is 0; give a whole number"),
        ({"rows_per_sample": {"x": 1.5}}, "is 1.5; give a whole number"),
        ({"padded": ["t"]}, "padded is"),
        ({"padded": {"t": 3}}, r"padded\['t'\] is 3"),
        ({"derived": {"t": 3}}, r"derived\['t'\] is 3"),
        ({"derived": ["t"]}, "derived is"),
    ],
)
def test_wrong_declarations_are_refused_when_they_are_made(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchSpec(**declared)


def test_wrong_padding_is_refused_when_it_is_declared() -> None:
    with pytest.raises(BatchError, match="path is 5"):
        MaxLength(5)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="side is 'top'"):
        Padded(side="top")  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="multiple is 0"):
        Padded(multiple=0)
    with pytest.raises(BatchError, match="value is '0'"):
        Padded(value="0")  # type: ignore[arg-type]
