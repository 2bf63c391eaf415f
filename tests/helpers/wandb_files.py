"""W&B's record logs as its writer lays them out (checksums left 0)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = 32768


def _varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def history(step: int, row: Mapping[str, Any]) -> bytes:
    """A record with a row of history."""
    items = b"".join(
        _field(1, _field(2, name.encode()) + _field(16, json.dumps(value).encode())) for name, value in row.items()
    )
    return _varint(1 << 3) + _varint(step + 1) + _field(2, items + _field(2, _varint(1 << 3) + _varint(step)))


def wandb_file(records: Sequence[bytes]) -> bytes:
    """A file of these records, divided where a block of 32 KiB ends."""
    text = b":W&B\xe1\xbe\x00"
    for record in records:
        rest, begun = record, False
        while True:
            left = BLOCK - len(text) % BLOCK
            if left < 7:
                text += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (3 if begun else 2) if rest else (4 if begun else 1)
            text += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            begun = True
            if not rest:
                break
    return text
