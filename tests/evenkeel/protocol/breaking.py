"""What would break whoever speaks an older definition of the wire."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)


def breaking_changes(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """Everything that `old` promises and `new` does not keep: additions are no breach."""
    return [
        *_package(old, new),
        *_messages("", {each.name: each for each in old.message_type}, {each.name: each for each in new.message_type}),
        *_enums("", {each.name: each for each in old.enum_type}, {each.name: each for each in new.enum_type}),
        *_services({each.name: each for each in old.service}, {each.name: each for each in new.service}),
    ]


def _package(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    for name in ("package", "syntax"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name} was {getattr(old, name)}, is {getattr(new, name)}"


def _messages(scope: str, old: dict[str, DescriptorProto], new: dict[str, DescriptorProto]) -> Iterator[str]:
    for name, before in old.items():
        path = f"{scope}{name}"
        after = new.get(name)
        if after is None:
            yield f"message {path} is gone"
            continue
        fields = {field.number: field for field in after.field}
        for field in before.field:
            changed = fields.get(field.number)
            if changed is None:
                yield f"{path}.{field.name} = {field.number} is gone"
                continue
            old_traits, new_traits = _traits(field, before), _traits(changed, after)
            for trait, value in old_traits.items():
                if new_traits[trait] != value:
                    yield f"{path}.{field.name} = {field.number}: {trait} was {value}, is {new_traits[trait]}"
            if field.proto3_optional and not changed.proto3_optional:
                yield f"{path}.{field.name} = {field.number}: 0 was told apart from what is absent"
        yield from _messages(f"{path}.", _by_name(before), _by_name(after))
        yield from _enums(
            f"{path}.", {each.name: each for each in before.enum_type}, {each.name: each for each in after.enum_type}
        )


def _by_name(message: DescriptorProto) -> dict[str, DescriptorProto]:
    return {each.name: each for each in message.nested_type}


def _traits(field: FieldDescriptorProto, message: DescriptorProto) -> dict[str, object]:
    chosen = field.HasField("oneof_index") and not field.proto3_optional  # an optional field is a oneof by itself
    oneof = message.oneof_decl[field.oneof_index].name if chosen else ""
    return {
        "name": field.name, "type": field.type, "type name": field.type_name, "label": field.label, "oneof": oneof,
        "packing": field.options.packed, "JSON name": field.json_name,
    }  # fmt: skip


def _enums(scope: str, old: dict[str, EnumDescriptorProto], new: dict[str, EnumDescriptorProto]) -> Iterator[str]:
    for name, before in old.items():
        if name not in new:
            yield f"enum {scope}{name} is gone"
            continue
        values = {value.number: value.name for value in new[name].value}
        for value in before.value:
            if values.get(value.number) != value.name:
                yield f"{scope}{name}.{value.name} = {value.number} became {values.get(value.number)}"


def _services(old: dict[str, ServiceDescriptorProto], new: dict[str, ServiceDescriptorProto]) -> Iterator[str]:
    for name, before in old.items():
        methods = {method.name: method for method in new[name].method} if name in new else {}
        for method in before.method:
            after = methods.get(method.name)
            if after is None:
                yield f"method {name}.{method.name} is gone"
                continue
            for trait in ("input_type", "output_type", "client_streaming", "server_streaming"):
                if getattr(method, trait) != getattr(after, trait):
                    was, became = getattr(method, trait), getattr(after, trait)
                    yield f"method {name}.{method.name}: {trait} was {was}, is {became}"
