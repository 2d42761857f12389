"""What the CPU can prove of the CUDA path: the source is complete, and the choice of its variants."""

import re
from importlib.resources import files

from trainer_client.embedding.routing import cuda


def test_the_source_is_all_files_with_the_common_part_first() -> None:
    folder = files("trainer_client.embedding.routing").joinpath("kernels")
    parts = {entry.name: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".cu")}
    source = cuda.source()
    assert source.startswith(parts["common.cu"])
    assert len(source) == sum(len(text) for text in parts.values())
    assert all(text in source and text.endswith("\n") for text in parts.values())
    assert re.findall(r'extern "C" __global__ .*?\) (\w+)\(', source) == list(cuda._KERNELS)
    assert source.count("{") == source.count("}")


def test_every_macro_that_the_source_asks_for_is_given() -> None:
    given = cuda.macros(8, key_bytes=8, length_bytes=4, weight_bytes=2, scatter=(512, 2))
    asked = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", cuda.source()))
    assert given.keys() <= asked
    head = cuda.source()[cuda.source().index("// Macros:") :].split("typedef")[0].split("struct Params")[0]
    assert set(re.findall(r"\b[A-Z]{3,}(?:_[A-Z]+)*\b", head)) == given.keys()


def test_parameters_are_those_of_the_structure_in_order() -> None:
    text = cuda.source()
    body = re.sub(r"//.*", "", text[text.index("struct Params {") : text.index("};", text.index("struct Params {"))])
    names = [
        name.strip(" *\n")
        for line in body.split("{")[1].split(";")
        for name in re.sub(r"^\s*(const )?\w+\b\*?", "", line).split(",")
        if name.strip()
    ]
    assert names == [name for name, _ in cuda._Params._fields_]
