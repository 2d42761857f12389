"""What the CPU can prove of the CUDA path."""

import re

from trainer_client.embedding.routing import cuda


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
