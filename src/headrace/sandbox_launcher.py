"""What a sandboxed program is started by: python -I -S sandbox_launcher.py FD LIMITS PROGRAM ARGUMENT ... (sandbox.py)

Shuts itself off, says on FD what the kernel granted, and runs the program as a child that dies with it. Standard library only, on purpose:
it is no import of the package.
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


def main() -> None:
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

    def time_is_up(*_: object) -> None:
        os.write(tell, b"seconds\n")
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
    _, status = os.waitpid(child, 0)  # goes on after the alarm (PEP 475)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # this process ends as the program did, without a core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
