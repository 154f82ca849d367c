"""Curves of benchmarks/models.py: losses of a small model's first steps, and how far two of them are apart."""

import io
import re
import time
import zlib
from pathlib import Path

import torch

VOCABULARY = 32000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU only to see that the script runs
FOLLOW = {"batch": 4, "length": 256, "lr": 1e-3}
MOVED = 1e-7  # of a weight, by which the second run of `control` starts beside the first


def count(model):
    return sum(p.numel() for p in model.parameters())


def words(text):
    """A text as ids below VOCABULARY: a word or sign is the checksum of its letters. text: a file's name, or None."""
    from dsf.analysis.text import read_text

    data = read_text(None if text is None else Path(text))[1]
    parts = re.findall(r"\w+|[^\w\s]", data.decode("utf-8", errors="ignore"))
    return torch.tensor([zlib.crc32(part.encode()) % VOCABULARY for part in parts])


class Run:
    """Training of a 20M model that can be stopped and resumed; starts and batches are drawn on the CPU."""

    def __init__(self, mixer, size, device, text, seed=0, precise=False):
        from dsf.models import CausalLM, decay_groups, sized

        torch.manual_seed(seed)
        self.device, self.precise = device, precise or device == "cpu"
        self.model = CausalLM(sized(size, [mixer], VOCABULARY, fused_loss=True)).to(device).train()
        self.optimizer = torch.optim.AdamW(decay_groups(self.model, 0.1), lr=FOLLOW["lr"], betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = words(text)

    def fingerprint(self):
        """What must be equal for two runs to be the same one."""
        weights = sum(p.detach().double().abs().sum().item() for p in self.model.parameters())
        return [round(weights, 3), zlib.crc32(self.ids.numpy().tobytes())]

    def step(self):
        batch, length = FOLLOW["batch"], FOLLOW["length"]
        starts = torch.randint(0, len(self.ids) - length, (batch, 1), generator=self.generator)
        ids = self.ids[starts + torch.arange(length)].to(self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=not self.precise):
            loss = self.model(ids, labels=ids, return_state=False).loss
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def move(self, by):
        """Change every weight by `by` of itself, times a random number near one."""
        generator = torch.Generator().manual_seed(1)
        for weight in self.model.parameters():
            weight.mul_(1 + by * torch.randn(weight.shape, generator=generator).to(weight.device))

    def save(self):
        """A checkpoint, as bytes."""
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.generator.get_state()]
        file = io.BytesIO()
        torch.save(parts, file)
        return file.getvalue()

    def load(self, data):
        model, optimizer, generator = torch.load(io.BytesIO(data), map_location=self.device, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.generator.set_state(generator.cpu())


def curve(job):
    """Losses of so many steps: float32 on a CPU, bfloat16 autocast on a GPU, there in float32, too (`precise`), and
    from weights that are moved (`moved`)."""
    device = job["device"] if DEVICE == "cuda" else "cpu"
    if device == "cpu":
        torch.set_num_threads(job["threads"])
    torch.backends.cuda.matmul.allow_tf32 = False
    run = Run(job["mixer"], job["size"], device, job["text"], precise=job.get("precise", False))
    if job.get("moved"):
        run.move(job["moved"])
    begin, fingerprint = time.perf_counter(), run.fingerprint()
    losses = [run.step() for _ in range(job["follow_steps"])]
    return {
        "device": device, "losses": losses, "fingerprint": fingerprint, "parameters": count(run.model),
        "seconds": time.perf_counter() - begin, **FOLLOW,
    }  # fmt: skip


def resume(job):
    """Whether 8 steps are the same to the bit as 4, a checkpoint, a new process's objects, and 4 more."""
    device = DEVICE
    whole = Run(job["mixer"], job["size"], device, job["text"])
    for _ in range(4):
        whole.step()
    saved = whole.save()
    expected = [whole.step() for _ in range(4)]
    again = Run(job["mixer"], job["size"], device, job["text"], seed=1)
    again.load(saved)
    got = [again.step() for _ in range(4)]
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    differing = sum((a != b).sum().item() for a, b in pairs)
    return {"device": device, "losses": [expected, got], "equal": expected == got and not differing,
            "weights_that_differ": differing}  # fmt: skip


def apartness(row):
    """How far two runs are apart, in words."""
    return f"{row['worst']:.2%} apart at most, {row['worst_of_tens']:.2%} in means of ten"


def apart(curves):
    """How far the first losses are from the second; curves: records of `curve`."""
    one, other = (torch.tensor(c["losses"], dtype=torch.float64) for c in curves)
    each = ((one - other) / other).abs()
    tens = [x.unfold(0, min(10, len(x)), min(10, len(x))).mean(1) for x in (one, other)]
    return {
        "worst": each.max().item(), "median": each.median().item(),
        "worst_of_tens": ((tens[0] - tens[1]) / tens[1]).abs().max().item(), "last": [one[-1].item(), other[-1].item()],
    }  # fmt: skip


def follow(curves):
    """How far the GPU's losses are from the CPU's; curves: records of `curve` by device kind."""
    same = curves[0]["fingerprint"] == curves[1]["fingerprint"]
    return apart(curves) | {"same_start": same, "gpu": curves[0], "cpu": curves[1]}


def control(worker, job, patience):
    """(how far bfloat16 and float32, and two runs in float32, are apart on the GPU, None), or (None, what failed)."""
    curves = {}
    for name, how in (("float32", {"precise": True}), ("bfloat16", {}), ("moved", {"precise": True, "moved": MOVED})):
        worker.ask({**job, "device": "cuda", **how})
        curves[name], why = worker.answer(patience)
        if curves[name] is None:
            return None, why
    exact, rounded, moved = (curves[name] for name in ("float32", "bfloat16", "moved"))
    return {"rounded": apart([rounded, exact]), "moved": apart([moved, exact]), "curves": curves}, None
