"""The system calls that a sandboxed program may not make, as a BPF program.

Owns: the list and its encoding for x86-64. Does not know: who installs it.

A program needs none of these; each has let somebody out of a sandbox, or reaches into the kernel's rarely trodden
parts. Refused calls fail with EPERM; ``clone3`` fails with ENOSYS, upon which C libraries take ``clone``, whose flags a
filter can read. Numbers: arch/x86/entry/syscalls/syscall_64.tbl; encoding: linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import errno
import struct

X86_64 = 0xC000003E
X32 = 0x40000000  # set in the numbers of another calling convention
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NAMESPACES = 0x7E020000  # CLONE_NEW* of user, mount, pid, net, ipc, uts and cgroup namespaces
CLONE, CLONE3 = 56, 435

DENIED = {
    "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "swapoff": 168,
    "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "finit_module": 313,
    "kexec_load": 246, "kexec_file_load": 320, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "setns": 308, "perf_event_open": 298, "open_by_handle_at": 304, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227,
    "adjtimex": 159, "clock_adjtime": 305, "syslog": 103, "vhangup": 153, "nfsservctl": 180, "personality": 135,
}  # fmt: skip

LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCH, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the first argument


def program() -> bytes:
    """The filter, as bubblewrap reads it from a file descriptor."""
    refuse = ERRNO | errno.EPERM
    rows = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQUAL, 1, 0, X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_SET, 0, 1, X32),
        (RETURN, 0, 0, KILL),
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
    for number in sorted(DENIED.values()):
        rows += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    rows += [
        (JUMP_EQUAL, 0, 3, CLONE),
        (LOAD, 0, 0, ARGUMENT),
        (JUMP_SET, 0, 1, NAMESPACES),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *row) for row in rows)
