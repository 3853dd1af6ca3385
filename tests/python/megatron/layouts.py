"""Cases of one rank: their process groups and their time.

Cases of one layout use the same groups.
torch ends the groups that Megatron makes only together with the default group, and every group of gloo has three threads: sixty a layout, which a
launch of many cases would collect by thousands.
"""

import contextlib
import faulthandler
import gc
import os
import time
import traceback

import torch.distributed as dist
from megatron.core import parallel_state

LIMIT = 240  # seconds of a case, which has one or two on a machine that does nothing else


class Layouts:
    def __init__(self, folder, rank, world):
        self.folder, self.rank, self.world = folder, rank, world
        self.made, self.layout = 0, None

    def meet(self):
        """Makes the default group."""
        self.made += 1
        dist.init_process_group("gloo", init_method=f"file://{self.folder}/store_{self.made}", rank=self.rank, world_size=self.world)

    def begin(self, tp=1, pp=1, cp=1, ep=1, vpp=None, **_):
        """Makes the groups of a layout, unless they are there."""
        layout = (tp, pp, cp, ep, vpp)
        if layout == self.layout:
            return
        self.end()
        self.meet()
        parallel_state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp, expert_model_parallel_size=ep,
                                                 **(dict(expert_tensor_parallel_size=1) if ep > 1 else {}))
        self.layout = layout

    def end(self):
        """Ends all groups and their threads."""
        if not dist.is_initialized():
            return
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        self.layout = None
        gc.collect()


@contextlib.contextmanager
def watched(name, rank):
    """Context of a case, which says its name and its time. A rank whose case fails or takes longer than LIMIT ends at once, for the others wait for it."""
    print(f"rank {rank}, case {name}", flush=True)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    start, processor = time.monotonic(), time.process_time()
    try:
        yield
    except BaseException:
        print(f"rank {rank}, case {name}\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    print(f"rank {rank}, case {name}: {time.monotonic() - start:.2f} s, of a processor {time.process_time() - processor:.2f} s", flush=True)
