"""Today's wire keeps what version 1 promised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from evenkeel.protocol import balancer_pb2 as pb
from tests.evenkeel.protocol.breaking import breaking_changes
from tests.evenkeel.protocol.wire_v1 import frozen_file


def copy_of(file: FileDescriptorProto) -> FileDescriptorProto:
    copied = FileDescriptorProto()
    copied.CopyFrom(file)
    return copied


def named(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(each for each in file.message_type if each.name == name)


def test_nothing_of_version_1_has_changed_or_vanished() -> None:
    today = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(today)
    assert breaking_changes(frozen_file(), today) == []


def test_what_is_added_breaks_nobody() -> None:
    file = copy_of(frozen_file())
    named(file, "Submit").field.add(name="more", number=100, type=FieldDescriptorProto.TYPE_STRING)
    file.message_type.add(name="More")
    file.enum_type[0].value.add(name="COUNTS_MORE", number=9)
    file.service[0].method.add(name="More", input_type=".a", output_type=".b")
    assert breaking_changes(frozen_file(), file) == []


def renumber(file: FileDescriptorProto) -> None:
    named(file, "Submit").field[0].number = 77


def retype(file: FileDescriptorProto) -> None:
    named(file, "Join").field[5].type = FieldDescriptorProto.TYPE_INT64


def rename(file: FileDescriptorProto) -> None:
    named(file, "Join").field[1].name = "training_job"


def make_repeated(file: FileDescriptorProto) -> None:
    named(file, "Joined").field[0].label = FieldDescriptorProto.LABEL_REPEATED


def leave_oneof(file: FileDescriptorProto) -> None:
    named(file, "Answer").field[1].ClearField("oneof_index")


def drop_message(file: FileDescriptorProto) -> None:
    file.message_type.remove(named(file, "SubmitGroup"))


def reuse_enum_number(file: FileDescriptorProto) -> None:
    named(file, "Decision").enum_type[1].value[1].name = "REASON_OTHER"


def stop_streaming(file: FileDescriptorProto) -> None:
    file.service[0].method[0].server_streaming = False


def drop_method(file: FileDescriptorProto) -> None:
    del file.service[0].method[-1]


def tell_0_from_absent(file: FileDescriptorProto) -> None:
    field = next(each for each in named(file, "PartitionOptions").field if each.name == "tolerance")
    field.proto3_optional, field.oneof_index = True, 0
    named(file, "PartitionOptions").oneof_decl.add(name="_tolerance")


def test_an_optional_field_stays_one_once_it_is_one() -> None:
    file = copy_of(frozen_file())
    tell_0_from_absent(file)
    assert breaking_changes(frozen_file(), file) == []
    (found,) = breaking_changes(file, frozen_file())
    assert found == "PartitionOptions.tolerance = 3: 0 was told apart from what is absent"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renumber, "Submit.round = 1 is gone"),
        (retype, "Join.restart_count = 6: type was"),
        (rename, "Join.job = 2: name was job, is training_job"),
        (make_repeated, "Joined.protocol_version = 1: label"),
        (leave_oneof, "Answer.decision = 2: oneof was result"),
        (drop_message, "message SubmitGroup is gone"),
        (reuse_enum_number, "Decision.Reason.REASON_DEADLINE = 1 became REASON_OTHER"),
        (stop_streaming, "method BalancerService.Balance: server_streaming was True"),
        (drop_method, "method BalancerService.GetServerInfo is gone"),
    ],
)
def test_each_breach_is_named(change: Callable[[FileDescriptorProto], None], said: str) -> None:
    file = copy_of(frozen_file())
    change(file)
    (found,) = breaking_changes(frozen_file(), file)[:1]
    assert found.startswith(said)
