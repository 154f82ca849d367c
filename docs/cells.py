"""Cells of the table in docs/objective.md that no paper names, for `dsf compare docs/cells.py:implicit_kda`.

`gradient_gated` and `gradient_kda` are Gated DeltaNet and KDA in the same terms, to compare with in the same layer.
"""

from dsf import Key, Memory, Scalar, System, Value, exp, inner, l2norm, learn, norm2, recurrence, sigmoid, softplus

S = Memory()


@recurrence
def gradient_gated(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """One gradient step at keys of length one from a decayed memory: Gated DeltaNet."""
    return learn(0.5 * norm2(S.T @ l2norm(k) - v), by="gradient", rate=sigmoid(b), decay=sigmoid(a), C=q)


@recurrence
def gradient_kda(q: Key, k: Key, v: Value, g: Key, b: Scalar) -> System:
    """The same, every row decayed at its own rate: KDA."""
    return learn(0.5 * norm2(S.T @ l2norm(k) - v), by="gradient", rate=sigmoid(b), decay=exp(-softplus(g)), C=q)


@recurrence
def implicit_gated(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """The square's exact minimum near the decayed memory."""
    return learn(0.5 * norm2(S.T @ k - v), by="implicit", rate=softplus(b), decay=sigmoid(a), C=q)


@recurrence
def implicit_kda(q: Key, k: Key, v: Value, g: Key, b: Scalar) -> System:
    """The same, every row decayed at its own rate."""
    return learn(0.5 * norm2(S.T @ k - v), by="implicit", rate=softplus(b), decay=exp(-softplus(g)), C=q)


@recurrence
def flow_gated(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """The square's flow from a decayed memory."""
    return learn(0.5 * norm2(S.T @ k - v), by="flow", rate=softplus(b), decay=sigmoid(a), C=q)


@recurrence
def flow_kda(q: Key, k: Key, v: Value, g: Key, b: Scalar) -> System:
    """The same, every row decayed at its own rate."""
    return learn(0.5 * norm2(S.T @ k - v), by="flow", rate=softplus(b), decay=exp(-softplus(g)), C=q)


@recurrence
def ridge_flow(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """The flow of the square and of weight decay together, which is no decay before a step."""
    return learn(0.5 * norm2(S.T @ k - v) + 0.5 * softplus(a) * norm2(S), by="flow", rate=softplus(b), C=q)


@recurrence
def write_and_forget(q: Key, k: Key, v: Value, l: Key, a: Scalar, b: Scalar) -> System:
    """Two losses in one exact step: hold v at k, hold nothing at l."""
    loss = 0.5 * norm2(S.T @ k - v) + 0.5 * softplus(a) * inner(S.T @ l, S.T @ l)
    return learn(loss, by="implicit", rate=softplus(b), C=q)
