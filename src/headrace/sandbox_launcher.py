"""What a sandboxed program is started by: python -I -S sandbox_launcher.py FD LIMITS PROGRAM ARGUMENT ... (sandbox.py)

Shuts itself off, says on FD what the kernel granted, and runs the program as a child that dies with it. Meanwhile it looks what all its
processes use together. Where headrace is killed it ends the program and removes its directory. Standard library only, on purpose: it imports
nothing of the package.
"""

import ctypes
import json
import math
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable

NEW_PID, NEW_NET, NEW_IPC, NEW_USER, NEW_MOUNTS = 0x20000000, 0x40000000, 0x08000000, 0x10000000, 0x00020000
SET_PDEATHSIG, SET_DUMPABLE, SET_NO_NEW_PRIVS, SET_SUBREAPER, SET_SECUREBITS = 1, 4, 38, 36, 28
NO_ROOT = 0b11
"""Whoever is root has nothing by that, for good."""
RECURSIVELY_PRIVATE, NO_DEVICES_OR_PROGRAMS, READ_ONLY = 0x44000, 0b1110, 0b1111
LOOK_SECONDS = 0.1
LOOK_SHARE = 0.1
"""Of a core, at most, however much there is to look at."""
SMALLEST_BYTES = 4096
FIRST_IPC_NAMESPACE = 0xEFFFFFFF
"""The machine's own: PROC_IPC_INIT_INO."""


def unshared(libc: ctypes.CDLL) -> tuple[bool, bool]:
    """(without network, with processes of its own)."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NET | NEW_PID | NEW_IPC) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            try:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            except OSError:
                pass  # it is nobody then, which is less, not more
        try:  # in this namespace: no file systems of the program's own, where nobody sees what it writes
            with open("/proc/sys/user/max_user_namespaces", "w") as file:
                file.write("0")
        except OSError:
            pass
        return True, True
    libc.unshare(NEW_IPC)
    return libc.unshare(NEW_NET) == 0, libc.unshare(NEW_PID) == 0


def own_mounts(libc: ctypes.CDLL, temporary: str) -> bool:
    """/proc of the program's own processes instead of the machine's. In the first process of their namespace.

    The sockets of Python's forkservers are hidden: whoever may connect to one can have it run anything, outside the sandbox.
    """
    if os.getpid() != 1 or libc.unshare(NEW_MOUNTS) != 0 or libc.mount(b"none", b"/", None, RECURSIVELY_PRIVATE, None) != 0:
        return False
    try:
        names = os.listdir(temporary)
    except OSError:  # nobody may list it, nor can the program
        names = []
    for name in names:
        if name.startswith("pymp-"):
            libc.mount(b"none", os.fsencode(os.path.join(temporary, name)), b"tmpfs", READ_ONLY, b"size=4k,mode=0")
    mounted: int = libc.mount(b"proc", b"/proc", b"proc", NO_DEVICES_OR_PROGRAMS, None)
    return mounted == 0


def limit(limits: dict[str, float]) -> None:
    seconds = math.ceil(limits["seconds"])
    wanted = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: int(limits["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NPROC: int(limits["max_processes"]),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def remove_tree(directory: str) -> None:
    """Removes what a program may have left: also thousands of directories in each other, which shutil.rmtree gives up, and without permissions.

    By descriptors that follow no link, as what left the program's session may still be there and put one in a directory's place.
    """
    top = _opened(directory, None)
    if top is None:
        return
    waiting, number = ["."], 0
    while waiting:
        name = waiting.pop()
        inside = top if name == "." else _opened(name, top)
        if inside is None:
            continue
        for entry in os.listdir(inside):
            if _unlinked(entry, inside) or (child := _opened(entry, inside)) is None:
                continue
            os.close(child)  # opening it has given it the permissions to be moved
            number += 1
            try:  # up, so that no path grows too long
                os.rename(entry, f".headrace-{number}", src_dir_fd=inside, dst_dir_fd=top)
            except OSError:
                continue
            waiting.append(f".headrace-{number}")
        if inside != top:
            os.close(inside)
            _remove_directory(name, top)
    os.close(top)
    _remove_directory(directory, None)


def _opened(name: str, within: int | None) -> int | None:
    """A directory, made ours to change; None where it is none or is gone."""
    try:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=within)
    except OSError:
        return None
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    finally:
        os.close(found)


def _unlinked(name: str, within: int) -> bool:
    try:
        os.unlink(name, dir_fd=within)
    except OSError:
        return False  # a directory
    return True


def _remove_directory(name: str, within: int | None) -> None:
    try:
        os.rmdir(name, dir_fd=within)
    except OSError:
        pass  # something that left its session still writes there


def passed(directory: str, limits: dict[str, float]) -> str | None:
    """Which limit of all processes together they are over: disk, memory or None."""
    below = descendants(os.getpid())
    disk, memory = deleted_bytes(below, os.stat(directory).st_dev)
    if disk + tree_bytes(directory, limits["disk_bytes"] - disk) > limits["disk_bytes"]:
        return "disk"
    memory += shared_segments_bytes()
    if memory + sum(map(resident_bytes, below)) > limits["total_memory_bytes"]:  # pages that they share count once for each: now exactly
        memory += sum(map(proportional_bytes, below))
        return "memory" if memory > limits["total_memory_bytes"] else None
    return None


def descendants(top: int) -> list[int]:
    """Processes below this one."""
    found = [top]
    for process in found:  # which grows
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            pass  # it has just ended
    return found[1:]


def resident_bytes(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def proportional_bytes(process: int) -> int:
    """Of a page that several processes have, each has a part."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return resident_bytes(process)


def deleted_bytes(processes: list[int], device: int) -> tuple[int, int]:
    """(on this device, in memory or elsewhere) of files without a name that these have open."""
    sizes: dict[tuple[int, int], int] = {}
    for process in processes:
        try:
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                found = os.stat(f"/proc/{process}/fd/{descriptor}")
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                    sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
        except OSError:
            pass  # it has just ended, or closed one
    here = sum(size for (where, _), size in sizes.items() if where == device)
    return here, sum(sizes.values()) - here


def shared_segments_bytes() -> int:
    """System V shared memory that no process holds; in a namespace of its own all of it is the program's."""
    try:
        with open("/proc/self/ns/ipc") as ours, open("/proc/sysvipc/shm") as file:
            if os.fstat(ours.fileno()).st_ino == FIRST_IPC_NAMESPACE:
                return 0
            names, *rows = (line.split() for line in file)
            attached, resident = names.index("nattch"), names.index("rss")
            return sum(int(row[resident]) for row in rows if row[attached] == "0")
    except (OSError, ValueError, IndexError):
        return 0


def tree_bytes(directory: str, limit: float) -> int:
    """On the disk, of all that is in the directory; counts to the limit. Every file and directory takes a place of its own.

    Goes down and up by descriptors, one at a time: no path grows too long, no depth is too deep, and no link is followed. Where the program
    moves directories meanwhile, it ends early.
    """
    here = _opened(directory, None)
    if here is None:
        return 0
    total = 0
    try:
        levels = [(_identity(here), os.listdir(here))]
        while levels and total <= limit:
            names = levels[-1][1]
            if not names:
                levels.pop()
                if levels:
                    here = _moved(here, os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here))
                    if _identity(here) != levels[-1][0]:
                        break
                continue
            try:
                name = names.pop()
                found = os.stat(name, dir_fd=here, follow_symlinks=False)
                total += max(SMALLEST_BYTES, found.st_blocks * 512)
                if stat.S_ISDIR(found.st_mode) and (below := _opened(name, here)) is not None:
                    here = _moved(here, below)
                    levels.append((_identity(here), os.listdir(here)))
            except OSError:
                continue  # it has just gone
    except OSError:
        pass
    finally:
        os.close(here)
    return total


def _moved(here: int, there: int) -> int:
    os.close(here)
    return there


def _identity(directory: int) -> tuple[int, int]:
    found = os.fstat(directory)
    return found.st_dev, found.st_ino


def wait(libc: ctypes.CDLL, child: int, parent: int, tell: int, seconds: float, look: Callable[[], str | None]) -> tuple[int, bool]:
    """(exit code, whether headrace was killed), when the program has ended by itself, at its limit, or because of that.

    `look`: which limit of all its processes together is passed, or None.
    """
    orphaned = over = False

    def end(number: int, _: object) -> None:
        nonlocal orphaned
        orphaned = orphaned or number == signal.SIGTERM  # by the signal: getppid() is still the same while another thread of headrace dies
        kill("seconds" if number == signal.SIGALRM else None)

    def kill(why: str | None) -> None:
        if over:  # its number may soon be another's
            return
        try:
            if why is not None:
                os.write(tell, f"{why}\n".encode())
        except OSError:
            pass  # nobody listens
        os.kill(child, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGTERM, end)
    libc.prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # only now: a new user namespace takes it away
    if os.getppid() != parent:
        end(signal.SIGTERM, None)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    wake = time.monotonic() + LOOK_SECONDS
    while not ended(child):
        if signal.sigtimedwait({signal.SIGCHLD}, max(0.0, wake - time.monotonic())) is None:
            began = time.process_time()
            if (why := look()) is not None:
                kill(why)
            wake = time.monotonic() + max(LOOK_SECONDS, (time.process_time() - began) / LOOK_SHARE)
    over = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), orphaned


def ended(child: int) -> bool:
    """Of the program, which stays to be waited for; what it left behind and came to us is cleared away."""
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if found.si_pid == child:
            return True
        os.waitpid(found.si_pid, 0)
    return False


def run(libc: ctypes.CDLL, tell: int, alive: int, limits: dict[str, float], granted: dict[str, bool], program: list[str]) -> None:
    """The child's side: becomes the program, or starts it. `alive` ends with the parent."""
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
        os._exit(1)  # the parent has died before it would have been told
    except BlockingIOError:
        pass
    proc = own_mounts(libc, os.path.dirname(os.getcwd()))
    libc.prctl(SET_SECUREBITS, NO_ROOT, 0, 0, 0)
    os.write(tell, (json.dumps({**granted, "proc": proc}) + "\n").encode())
    if os.getpid() == 1:
        be_first(libc, tell)
    os.close(tell)
    limit(limits)
    try:
        os.execv(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
        os._exit(127)


def be_first(libc: ctypes.CDLL, tell: int) -> None:
    """Of the process namespace, which ends with this process; returns in the program, which can do nothing to it.

    Were the program itself the first, it could refuse to end with its parent. In a group of its own it cannot stop the launcher by kill(0).
    """
    os.setsid()
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # no debugger, no descriptors in /proc
    program = os.fork()
    if program == 0:
        return
    os.closerange(0, 3)
    found, status = os.wait()
    while found != program:
        found, status = os.wait()
    os.write(tell, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def main() -> None:
    parent, directory = os.getppid(), os.getcwd()
    tell, limits, program = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None)
    privileges = libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)  # so that all its processes are below us
    network, processes = unshared(libc)
    alive, until_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(until_end)
        run(libc, tell, alive, limits, {"network": network, "processes": processes, "privileges": privileges, "number": os.getuid() != 0}, program)
    os.closerange(0, 3)
    code, orphaned = wait(libc, child, parent, tell, limits["seconds"], lambda: passed(directory, limits))
    if orphaned:
        remove_tree(directory)
    if code < 0:  # this process ends as the program did, without a core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
