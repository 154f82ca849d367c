"""What benchmarks/models.py measures in a process of its own: training steps of a model, its decoding, curves.

`worker` runs in a process of its own: jobs come as lines of JSON, records go back as lines that begin with RECORD.
"""

import json
import statistics
import sys
import time

import torch
from models_curves import DEVICE, VOCABULARY, count, curve, resume

FLA = {  # ours -> fla.models' configuration and model
    "gated_deltanet": ("GatedDeltaNetConfig", "GatedDeltaNetForCausalLM"),
    "deltanet": ("DeltaNetConfig", "DeltaNetForCausalLM"),
    "gla": ("GLAConfig", "GLAForCausalLM"),
    "kda": ("KDAConfig", "KDAForCausalLM"),
    "ssd": ("Mamba2Config", "Mamba2ForCausalLM"),
    "rwkv7": ("RWKV7Config", "RWKV7ForCausalLM"),
    "softmax_attention": ("TransformerConfig", "TransformerForCausalLM"),
}
PROMPT, CALLS = 64, 16  # tokens before decoding, steps in one timing


# Models


def ours(mixer, size):
    """(model, function of (model, ids) that returns the loss)."""
    from dsf.models import CausalLM, sized

    config = sized(size, [mixer], VOCABULARY, fused_loss=True)
    with torch.device(DEVICE):
        model = CausalLM(config)
    return model, lambda model, ids: model(ids, labels=ids, return_state=False).loss


def llama(mixer, size):
    """transformers' Llama of the softmax model's sizes, with torch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dsf.models import sized

    ref = sized(size, [mixer], VOCABULARY)
    heads = ref.heads(mixer)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=ref.d_model, intermediate_size=ref.hidden, num_hidden_layers=ref.n_layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=8192,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
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


BUILD = {"ours": ours, "llama": llama, "fla": fla}


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


# The clock and the memory


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


def fresh_peak():
    """Peak memory counts from here."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    """Peak memory in MiB since then; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else None


# Training


def training(job):
    """Steps of forward, backward and AdamW: bfloat16 autocast over float32 weights. graphed: both passes."""
    torch.manual_seed(0)
    fresh_peak()
    model, loss_of = BUILD[job["who"]](job["mixer"], job["size"])
    model.train()
    run = torch.compile(model) if job["compile"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    ids = torch.randint(0, VOCABULARY, (job["tokens"] // job["length"], job["length"]), device=DEVICE)

    def loss(ids):
        with torch.autocast(DEVICE, torch.bfloat16):
            return loss_of(run, ids)

    def pulled(ids):
        found = loss(ids)
        found.backward()
        return found.detach()

    if job["graphed"]:
        from dsf.models import Graphed

        pulled = Graphed(model, loss)

    def step():
        found = pulled(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found

    begin = time.perf_counter()
    first = step().item()
    compiled = time.perf_counter() - begin
    for _ in range(job["warmup"]):
        step()
    if not job["graphed"]:  # whose memory is in use between its calls, too, and counted while it is captured
        fresh_peak()
    times = [timed(step) for _ in range(job["steps"])]
    milliseconds = statistics.median(times)
    flops = matrix_flops(model, job["mixer"], job["tokens"], job["length"])
    return {
        "parameters": count(model), "ms": milliseconds, "ms_all": times, "first_step_s": compiled,
        "tokens_per_second": job["tokens"] / milliseconds * 1e3, "tflops": flops / milliseconds / 1e9,
        "mfu": flops / milliseconds * 1e3 / (job["peak"] * 1e12), "peak_mib": peak(),
        "loss": [first, step().item()],
    }  # fmt: skip


# Decoding


def decoder_of_ours(model, length):
    """(function of tokens [B, T] -> last logits, function -> the tensors that it keeps), for `length` tokens in all."""
    from dsf.mixers.models.states import tensors_of

    kept = [None]

    def advance(tokens):
        out = model(tokens, state=kept[0], in_place=kept[0] is not None)
        kept[0] = model.reserve(out.state, length)
        return out.logits[:, -1]

    return advance, lambda: [x for state in kept[0].layers for x in tensors_of(state)]


def decoder_of_theirs(who, model, length):
    """The same for a transformers-like model; Llama with a static cache of `length` tokens."""
    cache = [None]
    if who == "llama":
        from transformers import StaticCache

        cache[0] = StaticCache(config=model.config, max_cache_len=length)

    def advance(tokens):
        out = model(tokens, past_key_values=cache[0], use_cache=True)
        cache[0] = out.past_key_values
        return out.logits[:, -1]

    def tensors():
        layers = getattr(cache[0], "layers", [])
        return [x for y in layers for x in (getattr(y, "keys", None), getattr(y, "values", None)) if x is not None]

    return advance, tensors


def captured(play, tensors):
    """A CUDA graph of play, which must leave its states where they are, or why there is none."""
    if DEVICE == "cpu":
        return None, "no GPU"
    places = [x.data_ptr() for x in tensors()]
    play()
    if not places or places != [x.data_ptr() for x in tensors()]:
        return None, "its states move, so that a graph would read old ones"
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            play()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            play()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, f"not captured: {' '.join(str(error).split())[:120]}"
    return graph, None


@torch.no_grad()
def decoding(job):
    """One token more of every sequence: bfloat16 weights, the step in a CUDA graph where states stay in place."""
    torch.manual_seed(0)
    fresh_peak()
    who, batch = job["who"], job["batch"]
    model = BUILD[who](job["mixer"], job["size"])[0].to(torch.bfloat16).eval()
    ids = torch.randint(0, VOCABULARY, (batch, PROMPT), device=DEVICE)
    token = ids[:, :1].clone()
    length = PROMPT + job["warmup"] + CALLS * job["steps"] + 8
    advance, tensors = decoder_of_ours(model, length) if who == "ours" else decoder_of_theirs(who, model, length)

    def play():
        token.copy_(advance(token).argmax(-1, keepdim=True))

    begin = time.perf_counter()
    advance(ids)
    for _ in range(job["warmup"]):
        play()
    timed(play)
    compiled = time.perf_counter() - begin
    graph, why = captured(play, tensors)
    call = play if graph is None else graph.replay
    call()
    times = [timed(call, CALLS) for _ in range(job["steps"])]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = sum(x.numel() * x.element_size() for x in tensors())
    floor = (weights + 2 * states) / job["copy"] / 1e6
    return {
        "ms_a_token": statistics.median(times), "ms_all": times, "graph": graph is not None, "no_graph": why,
        "weight_bytes": weights, "state_bytes": states, "floor_ms": floor, "peak_mib": peak(), "first_s": compiled,
    }  # fmt: skip


# A GPU beside a CPU


WORK = {"training": training, "decoding": decoding, "curve": curve, "resume": resume}


def prepare(who):
    """Import what jobs of this kind need, before the clock."""
    import dsf.models  # noqa: F401

    if who == "llama":
        import transformers  # noqa: F401
    if who == "fla":
        import fla.models  # noqa: F401
        from gpu_compile import few_candidates, tune_quickly

        tune_quickly()
        few_candidates(4)


def worker(who):
    """Do jobs until standard input ends."""
    try:
        prepare(who)
    except Exception as error:
        print("FAILED " + json.dumps({"why": said(error)}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            found = WORK[job["kind"]](job)
        except Exception as error:
            print("FAILED " + json.dumps({"why": said(error)}), flush=True)
        else:
            print("RECORD " + json.dumps(found), flush=True)


def said(error):
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
