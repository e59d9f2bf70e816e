"""What a judgement of a plan says, and how it names a row or a storage."""

from __future__ import annotations

from dataclasses import dataclass

from tensile.schedules.plan import Plan


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a plan: the `rule` it breaks, `where` (a key path of the plan file) and a `message`."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message} at {self.where}"


def printable(text: str) -> str:
    """Text from a plan file, safe for a terminal: what is not printable becomes U+FFFD."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def row_name(plan: Plan, row: int) -> str:
    """A row in words: row 12 (aten.mm.default in h.0.attn)."""
    op = plan.rows[row]
    return printable(f"row {row} ({op.call} in {op.module})" if op.module else f"row {row} ({op.call})")


def storage_name(plan: Plan, storage: int) -> str:
    """A storage in words: storage 3 (h.0.attn/mm.2)."""
    return printable(f"storage {storage} ({plan.storages[storage].name})")
