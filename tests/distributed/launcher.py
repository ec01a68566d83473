"""Runs subjects on the processes of a backend: imports once, then forks them, and ends with them.

    python launcher.py FOLDER FAMILY PROCESSES[,PROCESSES]

FOLDER holds what the subjects' `prepare` has left there, and gets `FAMILY_PROCESSES_RANK.pt`: subject -> what came out
on that rank. What processes compute together is computed by forks, since importing all of TRL takes each more time
than all its cases.
"""

import os
import sys
import time
import traceback

import backends
import policy_worker
import preference_worker
import quick
import sampling_worker
import torch
from common import free_port

SUBJECTS = {"policies": policy_worker, "pairs": preference_worker, "sampling": sampling_worker}


def work(folder: str, family: str, rank: int, processes: int) -> None:
    """Everything that one process of a family does."""
    torch.set_num_threads(1)
    backends.start(family)
    found = {}
    for name, subject in SUBJECTS.items():
        if family == "ddp" or name != "sampling":  # which is the same whatever shards the model
            backends.restart()
            found[name] = subject.everything(folder, family, processes)
    torch.save(found, f"{folder}/{family}_{processes}_{rank}.pt")
    torch.distributed.destroy_process_group()


def fork(folder: str, family: str, rank: int, processes: int, port: int) -> int:
    """The id of a new process, which works and ends."""
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    status = 1
    try:
        work(folder, family, rank, processes)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def together(folder: str, family: str, processes: int) -> bool:
    """Whether all processes end well; where one does not the others, which wait for it, are ended."""
    port = free_port()
    running = {fork(folder, family, rank, processes, port) for rank in range(processes)}
    well = True
    while running:
        ended, status = os.wait()
        running.discard(ended)
        if status and well:
            well = False
            time.sleep(1)  # for the others to say what ails them
            for other in running:
                os.kill(other, 9)
    return well


if __name__ == "__main__":
    quick.remember_packages()
    quick.leave_out_of_collection()
    _folder, _family, _counts = sys.argv[1:]
    sys.exit(not all(together(_folder, _family, int(count)) for count in _counts.split(",")))
