"""Calls as they are where kernels are missing: rehearsed with nothing launched or computed, and then run."""

from triton.runtime.interpreter import InterpretedFunction

from dsf.kernels.triton import ahead, launch, tape


def install(monkeypatch):
    """Rehearse every first call of a kind, and compare what it would compile with what is launched."""
    log, run = [], InterpretedFunction.run

    def noted(self, *args, grid, warmup, **named):
        log.append((self.fn.__name__, launch._kinds(args), named, warmup))
        return run(self, *args, grid=grid, warmup=warmup, **named)

    def compiled(function, *args):
        log.clear()
        with monkeypatch.context() as waiting, ahead.Unwritten():
            waiting.setattr(launch, "waiting", lambda: True)
            function(*args)
        rehearsed = log.copy()
        log.clear()
        found = function(*args)
        assert [x[:3] for x in rehearsed] == [x[:3] for x in log]
        assert all(x[3] for x in rehearsed) and not any(x[3] for x in log)
        return found

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(tape, "compiled", compiled)
