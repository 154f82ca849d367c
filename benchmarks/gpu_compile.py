"""Peers' autotuners made short: kernels compiled on all cores before a benchmark starts, candidates timed briefly.

An autotuner compiles its candidates one after another, minutes for a row. Here worker processes compile a share each
without running them; the benchmark then finds all of them in Triton's cache and only has to time them.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time


@contextlib.contextmanager
def limit(seconds):
    """TimeoutError in the body after so many seconds."""

    def stop(*_):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def compile_share(share, of):
    """Let Triton's autotuners compile every `of`-th candidate from `share` on, and run none."""
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for number, config in enumerate(self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs):
            if number % of == share:
                with contextlib.suppress(Exception):  # candidates may not fit this GPU; the autotuner skips them too
                    self.fn.run(*args, **(kwargs | {"warmup": True}), **config.all_kwargs())
        self.nargs, self.best_config = None, self.configs[0]  # some callers read it

    Autotuner.run = run


def tune_quickly(milliseconds=8):
    """Let Triton's autotuners time every candidate this long instead of 100 ms, in this process."""
    import functools

    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = staticmethod(functools.partial(do_bench, warmup=2, rep=milliseconds))


def few_candidates(count):
    """Let Triton's autotuners try this many candidates a kernel."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, kwargs: list(prune(self, kwargs))[:count]


def _task(name, job, share, of, seconds):
    """What one worker does; it ends then, since what it patched and what its kernels wrote is of no further use."""
    begin, outcome = time.time(), "compiled"
    try:
        with limit(seconds):
            if of:
                compile_share(share, of)
            job()
    except Exception as error:
        outcome = f"{type(error).__name__}: {' '.join(str(error).split())}"[:150]
    print(f"{name} {share}/{of}: {outcome}, {time.time() - begin:.0f} s", flush=True)


def compile_all(jobs, seconds):
    """jobs: (name, callable, shares), 0 shares where no autotuner is. To be called before this process uses CUDA.

    Returns the names of those whose worker died: what aborts in the compiler would take the benchmark with it.
    """
    fork = multiprocessing.get_context("fork")
    waiting = [(name, job, share, of, seconds) for name, job, of in jobs for share in range(max(1, of))]
    running, dead = {}, set()
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            work = waiting.pop(0)
            process = fork.Process(target=_task, args=work)
            process.start()
            running[process.sentinel] = process, time.time() + seconds + 10, work[0]
        for sentinel in multiprocessing.connection.wait(list(running), timeout=1):
            process, _, name = running.pop(sentinel)
            process.join()
            if process.exitcode in (-signal.SIGABRT, -signal.SIGSEGV):
                dead.add(name)
        for process, deadline, _ in running.values():
            if time.time() > deadline:
                process.kill()
    return dead
