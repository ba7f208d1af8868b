"""`python -m fakes.chaos_child scripted|real NOTES COMMAND ...`: the headrace command, watched for kills.

Notes down, in files that survive its own death, the pid of each role process as it starts and every record of the journal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PIDS, RECORDS = "pids", "records"


def note_pids(notes: Path) -> None:
    from headrace.runtime.processes import RoleProcess

    start = RoleProcess._start
    file = (notes / PIDS).open("a", buffering=1)

    async def noted(role: RoleProcess) -> None:
        await start(role)
        file.write(f"{role.name} {role.pid}\n")

    RoleProcess._start = noted  # type: ignore[method-assign]


def note_records(notes: Path) -> None:
    from headrace.pool.journal import Consumed, Record, Reserved, Restored, Retired, StateTaken
    from headrace.runtime.journal import RunJournal

    append = RunJournal.append
    file = (notes / RECORDS).open("a", buffering=1)

    def noted(journal: RunJournal, record: Record) -> int:
        number = append(journal, record)
        told: dict[str, Any] | None = None
        match record:
            case Consumed():
                told = {"keys": record.keys, "version": record.version_after}
            case Retired():
                told = {"keys": [record.key], "reason": record.reason}
            case Reserved():
                told = {"group": record.group_id, "size": record.size}
            case Restored() | StateTaken():
                told = {"version": record.version}
        if told is not None:
            file.write(json.dumps({"kind": type(record).__name__, **told}) + "\n")
        return number

    RunJournal.append = noted  # type: ignore[method-assign]


def main() -> int:
    kind, notes = sys.argv[1], Path(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    if kind == "scripted":
        from fakes.hosts import install_scripted_roles

        install_scripted_roles()
    note_pids(notes)
    note_records(notes)
    from headrace.cli.__main__ import entry

    return entry()


if __name__ == "__main__":
    sys.exit(main())
