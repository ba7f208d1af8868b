"""Rollout processes let the garbage collector come by rarely (runtime/hosts.py): harmless because a rollout leaves nothing for it (I15)."""

from __future__ import annotations

import asyncio
import gc

from fakes.rollouts import ScriptedSampler, rollout_request, scripted_task, scripted_worker
from headrace.clock import run_virtual

MEMBERS, GROUPS = 32, 8


def test_finished_rollouts_leave_no_objects_in_cycles() -> None:
    async def main() -> int:
        worker = scripted_worker(ScriptedSampler(max_running=MEMBERS))

        async def roll_out(group_id: int) -> None:
            waits = {"answers": 3, "wait_seconds": [0.0, 0.5]}
            tasks = [scripted_task(f"{group_id}-{member}", fail_at=1 if member % 8 == 0 else None, **waits) for member in range(MEMBERS)]
            await worker.start([rollout_request(group_id=group_id, member=member, task=task) for member, task in enumerate(tasks)])
            num_finished = 0
            while num_finished < MEMBERS:
                num_finished += len((await worker.next_report()).finished)

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.next_report()
            await roll_out(0)
            gc.collect()
            for group_id in range(1, GROUPS + 1):
                await roll_out(group_id)
            unreachable = gc.collect()
            await worker.stop()
        return unreachable

    enabled = gc.isenabled()
    gc.disable()
    try:
        unreachable = run_virtual(main())
    finally:
        if enabled:
            gc.enable()
    num_good = GROUPS * MEMBERS * 7 // 8
    # a failing rollout may leave its exception and the frames it names; the others nothing
    assert unreachable < num_good, f"{unreachable} objects after {GROUPS * MEMBERS} rollouts"
