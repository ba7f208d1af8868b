"""What a sandboxed program is started by: python -I -S sandbox_launcher.py FD LIMITS PROGRAM ARGUMENT ... (sandbox.py)

Shuts itself off, says on FD what the kernel granted, and runs the program as a child that dies with it. Where headrace is killed it ends the
program and removes its directory. Standard library only, on purpose: it imports nothing of the package.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys

NEW_PID, NEW_NET, NEW_USER = 0x20000000, 0x40000000, 0x10000000
SET_PDEATHSIG, SET_NO_NEW_PRIVS = 1, 38


def unshared(libc: ctypes.CDLL) -> tuple[bool, bool]:
    """(without network, with processes of its own)."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NET | NEW_PID) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            try:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            except OSError:
                pass  # it is nobody then, which is less, not more
        return True, True
    return libc.unshare(NEW_NET) == 0, libc.unshare(NEW_PID) == 0


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


def wait(libc: ctypes.CDLL, child: int, parent: int, tell: int, seconds: float) -> tuple[int, bool]:
    """(exit code, whether headrace was killed), when the program has ended by itself, at its limit, or because of that."""
    orphaned = False

    def end(number: int, _: object) -> None:
        nonlocal orphaned
        orphaned = orphaned or number == signal.SIGTERM  # by the signal: getppid() is still the same while another thread of headrace dies
        try:
            if number == signal.SIGALRM:
                os.write(tell, b"seconds\n")
            os.kill(child, signal.SIGKILL)
        except OSError:
            pass  # it has just ended, or nobody listens

    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGTERM, end)
    libc.prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # only now: a new user namespace takes it away
    if os.getppid() != parent:
        end(signal.SIGTERM, None)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _, status = os.waitpid(child, 0)  # goes on after a signal (PEP 475)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status), orphaned


def main() -> None:
    parent, directory = os.getppid(), os.getcwd()
    tell, limits, program = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None)
    privileges = libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    network, processes = unshared(libc)
    os.write(tell, (json.dumps({"network": network, "processes": processes, "privileges": privileges, "number": os.getuid() != 0}) + "\n").encode())
    child = os.fork()
    if child == 0:
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(tell)
        limit(limits)
        try:
            os.execv(program[0], program)
        except OSError as error:
            os.write(2, f"{program[0]}: {error.strerror}\n".encode())
            os._exit(127)
    os.closerange(0, 3)
    code, orphaned = wait(libc, child, parent, tell, limits["seconds"])
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
