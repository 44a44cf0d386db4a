"""How a command is carried out on a machine that only runs lines of bash: the script that does it, what it is given and
what it says.

Owns: `SCRIPT`, `job`, `Report`. Does not know: providers, how a line gets there.

Each call is ``bash -c SCRIPT _ MODE ID SECONDS JOB DONE``. The script starts a supervisor of its own for the command,
once for an id, however often it is asked; so a call whose answer was lost can be made again. It waits SECONDS for the
end and says how it went, or that it goes on. In the end whatever the command started is killed: what has its variable
in its environment, and what is in its session. A process that left both lives until the sandbox is removed.

The text has no single quote, so that all it needs is to be put between two of them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from minirllm.errors import SandboxError
from minirllm.sandboxes import BASH, Command

INLINE = 48 * 1024  # bytes that travel in a line, or in the answer to one; more goes as a file
PLACE = "/tmp/.minirllm-"  # and the id: a folder of the command's
WORD = "minirllm"  # begins a report
BEGIN, WAIT, END, CLEAN = "begin", "wait", "end", "clean"

SCRIPT = r"""
path=$PATH; PATH=/usr/bin:/bin:/usr/sbin:/sbin; umask 077
id=$2; patience=$3; d=/tmp/.minirllm-$id; mark=MINIRLLM_COMMAND=$id

ooms() {
    local key count all=0
    while read -r key count; do [ "$key" = oom_kill ] && all=$count; done \
        < <(cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2> /dev/null)
    echo "$all"
}

hunt() {  # kill what the command started, until there is nothing left
    local round found place stat sid
    for round in {1..100}; do
        found=
        read -r sid 2> /dev/null < "$d/sid"
        for place in $(grep -lszxF "$mark" /proc/[0-9]*/environ); do
            place=${place%/environ}
            kill -9 "${place#/proc/}" 2> /dev/null && found=1
        done
        [ "$sid" ] && for place in /proc/[0-9]*; do
            read -r stat 2> /dev/null < "$place/stat" || continue
            set -- ${stat##*) }
            [ "$4" = "$sid" ] && [ "$1" != Z ] && kill -9 "${place#/proc/}" 2> /dev/null && found=1
        done
        [ "$found" ] || return
    done
}

keep() {  # of stream $1 as many bytes as there may be; of one with more, end the command
    local reading
    trap "kill \$reading" TERM
    if [ "$tail" = 1 ]; then
        tail -c "$limit" < "$d/$1" > "$d/out$1" & reading=$!
    else  # tee, as head keeps to itself what it has read when it is killed
        tee "$d/out$1" < "$d/$1" > >(head -c $((limit + 1)) > /dev/null) & reading=$!
    fi
    wait "$reading"
    if [ "$(size "$1")" -gt "$limit" ]; then : > "$d/flooded"; hunt; fi
}

supervise() {
    echo "$BASHPID" > "$d/pid.part" && mv "$d/pid.part" "$d/pid"
    [ -e "$d/stop" ] && return
    local all cwd seconds blocks count before code timer readers part
    mapfile -d "" -t all < "$job" || return
    cwd=${all[0]} limit=${all[1]} tail=${all[2]} seconds=${all[3]} blocks=${all[4]} count=${all[5]}
    cd -- "$cwd" 2> "$d/out2" || { echo "cwd 0" > "$d/end"; return; }
    before=$(ooms)
    mkfifo "$d/1" "$d/2" || return
    keep 1 & readers=$!
    keep 2 & readers="$readers $!"
    ( trap "kill \$nap" TERM; sleep "$seconds" & nap=$!; wait "$nap" && { : > "$d/late"; hunt; } ) & timer=$!
    (
        echo "$BASHPID" > "$d/sid"
        ulimit -c 0; ulimit -f "$blocks"
        for part in "${!DAYTONA_@}" "${!MODAL_@}"; do unset "$part"; done
        exec $(command -v setsid) env "PATH=$path" "${all[@]:6:count}" "$mark" "${all[@]:6+count}"
    ) < "$in" > "$d/1" 2> "$d/2"
    code=$?
    kill "$timer"
    hunt
    ( trap "kill \$nap" TERM; sleep 3 & nap=$!; wait "$nap" && kill $readers ) & timer=$!  # one got away
    wait $readers
    kill "$timer"
    echo "$code $(($(ooms) - before))" > "$d/end.part"
    mv "$d/end.part" "$d/end"
    exec 8<> "$d/wake"
    echo >&8
}

size() { stat -c %s "$d/out$1" 2> /dev/null || echo 0; }
has() { [ -e "$d/$1" ] && echo 1 || echo 0; }
alive() { local pid; read -r pid 2> /dev/null < "$d/pid" && kill -0 "$pid" 2> /dev/null; }

report() {
    local code=137 oom=0 until=$((SECONDS + patience)) said
    exec 9<> "$d/wake"
    while [ ! -e "$d/end" ] && alive && ((SECONDS < until)); do read -r -t 1 -u 9; done
    if [ ! -e "$d/end" ] && alive; then echo "minirllm $id running"; return; fi
    if [ -e "$d/end" ]; then read -r code oom < "$d/end"; else hunt; fi  # its supervisor may have been killed
    said="$(size 1) $(size 2)"
    echo "minirllm $id $code $(has late) $(has flooded) $oom $said"
    if ((${said% *} + ${said#* } <= INLINE)); then
        echo "$(base64 -w 0 "$d/out1" 2> /dev/null)."
        echo "$(base64 -w 0 "$d/out2" 2> /dev/null)."
    fi
}

for old in $5; do rm -rf "/tmp/.minirllm-$old" "/tmp/.minirllm-$old".*; done
case $1 in
    begin)
        mkdir -p /tmp
        if why=$(mkdir "$d" 2>&1); then
            job=$d.job in=$d.in
            if [ "$4" ]; then
                job=$d/job in=$d/in
                { base64 -d <<< "${4%.*}" > "$job" && base64 -d <<< "${4#*.}" > "$in"; } || why="no room"
            fi
            mkfifo "$d/wake" || why="no fifo"
            if [ "$why" ]; then echo "minirllm $id failed $why"; exit; fi
            set -m
            { set +m; supervise; } < /dev/null > /dev/null 2>&1 &
            for why in {1..500}; do [ -e "$d/pid" ] && break; sleep 0.01; done
        elif [ ! -d "$d" ]; then
            echo "minirllm $id failed $why"; exit
        fi
        report ;;
    wait) report ;;
    end)
        mkdir -p "$d"; : > "$d/stop"
        read -r pid 2> /dev/null < "$d/pid" && kill -9 -- "-$pid" 2> /dev/null
        hunt
        echo "minirllm $id ended" ;;
    clean) echo "minirllm $id clean" ;;
esac
""".replace("INLINE", str(INLINE))


def job(command: Command, work: str, disk: int) -> bytes:
    """What the script is told of a command; each file that it writes has `disk` bytes at most."""
    env = [f"{name}={value}" for name, value in command.env.items()]
    head = [command.cwd or work, command.output, int(command.tail), command.timeout, max(1, disk // 1024), len(env)]
    return b"".join(f"{part}\0".encode() for part in (*head, *env, *command.argv))


def line(mode: str, id: str, patience: float, sent: Sequence[bytes], done: Sequence[str]) -> list[str]:
    """The command line of one call; `sent` is the job and its input, or nothing; folders of `done` are removed."""
    packed = ".".join(base64.b64encode(part).decode() for part in sent)
    return [BASH, "-c", SCRIPT, "_", mode, id, str(int(patience)), packed, " ".join(done)]


@dataclass(frozen=True)
class Report:
    """What the script says of a command that has ended. Without `outputs` they are in files."""

    code: int  # NO_FOLDER where it could not begin
    late: bool
    flooded: bool
    oom: bool
    sizes: tuple[int, int]
    outputs: tuple[bytes, bytes] | None


NO_FOLDER = -1


def running(said: str, id: str) -> bool:
    """Does a call say that the command goes on?"""
    return f"{WORD} {id} running" in said


def read(said: str, id: str) -> Report | None:
    """The report in what a call printed; None when the command goes on, or nobody knows. Raises SandboxError."""
    head, *rest = said.partition(f"{WORD} {id} ")[2].splitlines() or [""]
    words = head.split()
    if words[:1] == ["failed"]:
        raise SandboxError(f"A command cannot be started in the sandbox: {' '.join(words[1:])[-300:]}.")
    if len(words) != 6:
        return None
    try:
        code = NO_FOLDER if words[0] == "cwd" else int(words[0])
        late, flooded, oom, *sizes = map(int, words[1:])
        outputs = tuple(base64.b64decode(part.rstrip(".")) for part in rest[:2])
    except ValueError:  # a program may write where the script does
        return None
    whole = (outputs[0], outputs[1]) if len(outputs) == 2 and tuple(map(len, outputs)) == tuple(sizes) else None
    return Report(code, bool(late), bool(flooded), oom > 0, (sizes[0], sizes[1]), whole)
