"""Language models on a CUDA GPU: training steps and decoding, ours, transformers' Llama and fla's beside.

python benchmarks/models.py [--mixers gated_deltanet ssd] [--size 340m] [--json results/models.json] [--compile]

Training: forward, backward and AdamW of 32,768 tokens a step at T = 4096, bfloat16 autocast over float32 weights;
tokens/s, model flops utilisation (6 flops a weight of matrices and a token, and softmax's 6 · T · d a layer, over
--peak TFLOP/s), peak memory. Decoding: one token of every sequence, in a CUDA graph where the states stay in place, at
batch 1 and 128. Medians; each model in a process of its own, so that memory is its own and one failure stops no other.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

SCHEMA = "dsf.models/1"
MIXERS = ("softmax_attention", "gated_deltanet", "deltanet", "ssd", "s6", "gla", "kda", "rwkv7")
VOCABULARY = 32000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU only to see that the script runs
FLA = {  # ours -> fla.models' configuration and model
    "gated_deltanet": ("GatedDeltaNetConfig", "GatedDeltaNetForCausalLM"),
    "deltanet": ("DeltaNetConfig", "DeltaNetForCausalLM"),
    "gla": ("GLAConfig", "GLAForCausalLM"),
    "kda": ("KDAConfig", "KDAForCausalLM"),
    "rwkv7": ("RWKV7Config", "RWKV7ForCausalLM"),
    "softmax_attention": ("TransformerConfig", "TransformerForCausalLM"),
}


def ours(mixer, size):
    """(model, function of (model, ids) that returns the loss)."""
    from dsf.models import CausalLM, sized

    config = sized(size, [mixer], VOCABULARY, fused_loss=True)
    with torch.device(DEVICE):
        model = CausalLM(config)
    return model, lambda model, ids: model(ids, labels=ids, return_state=False).loss


def llama(size, implementation="sdpa"):
    """transformers' Llama of the softmax model's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dsf.models import sized

    ref = sized(size, ["softmax_attention"], VOCABULARY)
    heads = ref.heads("softmax_attention")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=ref.d_model, intermediate_size=ref.hidden, num_hidden_layers=ref.n_layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=8192,
    )  # fmt: skip
    config._attn_implementation = implementation
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    return model, lambda model, ids: model(ids, labels=ids).loss


def fla(mixer, size):
    """fla's model of the same width, layers and MLP, its other defaults its own."""
    import fla.models

    from dsf.models import sized

    ref = sized(size, [mixer], VOCABULARY)
    config, model = (getattr(fla.models, name) for name in FLA[mixer])
    made = config(
        vocab_size=VOCABULARY, hidden_size=ref.d_model, num_hidden_layers=ref.n_layers, intermediate_size=ref.hidden,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = model(made)
    return model, lambda model, ids: model(ids, labels=ids).loss


def build(who, mixer, size):
    """One of ours, llama, fla."""
    return {"ours": ours, "fla": fla}[who](mixer, size) if who != "llama" else llama(size)


def matrix_flops(model, mixer, tokens, length):
    """6 flops a weight of matrices and a token (tied heads count once more than embeddings do), plus softmax's."""
    config = model.config
    layers = getattr(config, "n_layers", None) or config.num_hidden_layers
    width = getattr(config, "d_model", None) or config.hidden_size
    inner = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n
    )
    softmax = 6 * length * width * layers if mixer == "softmax_attention" else 0  # causal: half of 12
    return tokens * (6 * (inner + VOCABULARY * width) + softmax)


def timed(function, calls=1):
    """Milliseconds a call."""
    if DEVICE == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def peak_of_now(reset=False):
    """Peak memory in MiB since the last reset; None on a CPU."""
    if DEVICE == "cpu":
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**20


def training(who, mixer, args):
    """One record of training steps."""
    torch.manual_seed(0)
    model, loss_of = build(who, mixer, args.size)
    model.train()
    if args.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    ids = torch.randint(0, VOCABULARY, (args.tokens // args.length, args.length), device=DEVICE)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begin = time.perf_counter()
    first = float(step())
    compiled = time.perf_counter() - begin
    for _ in range(args.warmup):
        step()
    peak_of_now(reset=True)
    times = [timed(step) for _ in range(args.steps)]
    last = step()
    milliseconds = statistics.median(times)
    flops = matrix_flops(model, mixer, args.tokens, args.length)
    return {
        "kind": "training", "who": who, "mixer": mixer, "size": args.size, "compile": args.compile,
        "parameters": sum(p.numel() for p in model.parameters()), "ms": milliseconds, "ms_all": times,
        "tokens_per_second": args.tokens / milliseconds * 1e3, "mfu": flops / milliseconds * 1e3 / (args.peak * 1e12),
        "peak_mib": peak_of_now(), "first_step_s": compiled,
        "loss": [first, float(last)],
    }  # fmt: skip


def decode_floor(model, batch, rate):
    """Milliseconds to read weights once and states twice (read, written) at `rate` TB/s."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = 2 * 4 * batch * model.state_size(0)
    return (weights + states) / (rate * 1e12) * 1e3


@torch.no_grad()
def decoding(who, mixer, batch, args):
    """One record of decoding steps: bfloat16 weights, states in place."""
    torch.manual_seed(0)
    model, _ = build(who, mixer, args.size)
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(0, VOCABULARY, (batch, 64), device=DEVICE)
    token = ids[:, 0].clone()
    graph = who == "ours" and mixer != "softmax_attention" and DEVICE == "cuda"
    if who == "ours":
        from dsf.mixers.models.states import Kept, ModelState, tensors_of

        kept = [Kept(static=True) for _ in model.model.layers]

        def advance(tokens):
            state = ModelState(tuple(k.state for k in kept)) if kept[0].state is not None else None
            out = model(tokens, state=state)
            for k, after in zip(kept, out.state.layers, strict=True):
                k.store(after, tokens.shape[1])
            token.copy_(out.logits[:, -1].argmax(-1))
    else:
        cache = [None]

        def advance(tokens):
            out = model(tokens, past_key_values=cache[0], use_cache=True)
            cache[0] = out.past_key_values
            token.copy_(out.logits[:, -1].argmax(-1))

    advance(ids)
    for _ in range(args.warmup):
        advance(token.unsqueeze(1))
    play = lambda: advance(token.unsqueeze(1))  # noqa: E731
    if graph:
        places = [x.data_ptr() for k in kept for x in tensors_of(k.state)]
        play()
        if places != [x.data_ptr() for k in kept for x in tensors_of(k.state)]:
            raise RuntimeError("states do not stay where they are: a graph would read old ones")
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            play()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            play()
        play = captured.replay
    play()
    times = [timed(play, 16) for _ in range(args.steps)]
    found = {
        "kind": "decoding", "who": who, "mixer": mixer, "size": args.size, "batch": batch, "graph": graph,
        "ms_a_token": statistics.median(times), "ms_all": times,
        "peak_mib": peak_of_now(),
    }  # fmt: skip
    if who == "ours":
        found["floor_ms"] = decode_floor(model, batch, args.copy)
    return found


def one(args):
    """The record that a process of its own was started for."""
    who, mixer, what = args.one
    record = training(who, mixer, args) if what == "training" else decoding(who, mixer, int(what), args)
    print("RECORD " + json.dumps(record), flush=True)


def cases(args):
    """(who, mixer, what) of every record wanted."""
    peers = [("llama", "softmax_attention")] if "llama" not in args.without else []
    try:
        import fla.models  # noqa: F401

        peers += [("fla", m) for m in args.mixers if m in FLA] if "fla" not in args.without else []
    except Exception as error:  # fla refuses some releases of Triton with errors of many kinds
        print(f"fla.models is not here: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    for who, mixer in [*(("ours", m) for m in args.mixers), *peers]:
        yield who, mixer, "training"
        for batch in args.batches:
            yield who, mixer, str(batch)


def machine():
    """Where it ran."""
    if DEVICE == "cpu":
        return {"device": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "torch": torch.__version__, "memory_gib": properties.total_memory / 2**30}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--size", default="340m")
    parser.add_argument("--tokens", type=int, default=32768, help="a step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 128])
    parser.add_argument("--peak", type=float, default=989.0, help="dense bfloat16 TFLOP/s of the GPU")
    parser.add_argument("--copy", type=float, default=4.27, help="TB/s that a copy reaches")
    parser.add_argument("--without", nargs="*", default=[], choices=("llama", "fla"))
    parser.add_argument("--compile", action="store_true", help="training through torch.compile")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("WHO", "MIXER", "WHAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args)
    records, failed = [], []
    for case in cases(args):
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", *case], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
        if not lines:
            why = (done.stderr.strip().splitlines() or ["no word"])[-1]
            failed.append({"case": list(case), "why": why[:300]})
            print(f"{' '.join(case):40} failed: {why[:160]}", flush=True)
            continue
        record = json.loads(lines[0][7:])
        records.append(record)
        shown = (
            f"{record['tokens_per_second']:>10,.0f} tokens/s  MFU {record['mfu']:.1%}  {record['peak_mib'] or 0:,.0f} M"
            if record["kind"] == "training"
            else f"{record['ms_a_token']:>10.3f} ms a token" + (" (graph)" if record["graph"] else "")
        )
        print(f"{' '.join(case):40} {shown}", flush=True)
    if args.json is not None:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "one")}
        data = {"schema": SCHEMA, "machine": machine(), "settings": settings, "records": records, "failed": failed}
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
