"""Plans that cut layers: what is found, what is given, what is refused, and what the report says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.tensor import verify
from paceline.parallel.tensor.apply import apply_plan
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.find_plan import find_plan
from paceline.parallel.tensor.plan import TensorPlan
from tensor_models import CASES, HUGGING_FACE, Nano, SkipMLP, build, hugging_face, seeded, tokens


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """Tiny products in threads of their own would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def roles(plan: TensorPlan) -> dict[str, str]:
    return {layer.name: layer.role for layer in plan.layers}


def emulated_step(model: nn.Module, plan: TensorPlan, loss: Any) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the whole gradients as each emulated worker has them."""

    def work(group: EmulatedGroup) -> tuple[float, dict[str, Tensor]]:
        part = copy.deepcopy(model)
        cut = apply_plan(part, plan, group)
        value = loss(part)
        value.backward()
        summed = {id(one) for one in cut.summed}
        found: dict[str, Tensor] = {}
        for name, one in part.named_parameters():
            if one.grad is not None:
                grad = group.all_reduce(one.grad) if id(one) in summed else one.grad
                found[name] = cut.parameters[name].whole(group.all_gather(grad)) if name in cut.parameters else grad
        return value.item(), found

    return emulate(plan.size, work)


def assert_same_step(model: nn.Module, plan: TensorPlan, loss: Any, tolerance: float = 1e-9) -> None:
    whole = copy.deepcopy(model)
    expected = loss(whole)
    expected.backward()
    gradients = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    for value, found in emulated_step(model, plan, loss):
        assert value == pytest.approx(expected.item(), rel=tolerance)
        assert found.keys() == gradients.keys()
        for name, grad in gradients.items():
            assert float((found[name] - grad).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize(
    ("kind", "sequence"),
    [(kind, sequence) for kind in CASES for sequence in (False, True) if (kind, sequence) != ("vit", True)],
)  # vit has 17 tokens, which do not divide: that they are refused is another test
def test_emulated_workers_agree_with_the_whole_model(kind: str, sequence: bool) -> None:
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    model = build(kind, torch.float64)
    plan = find_plan(model, size=2, sequence=sequence)
    assert plan.layers
    assert_same_step(model, plan, lambda one: CASES[kind].loss(one, torch.float64))


def test_what_is_found_in_each_model() -> None:
    pytest.importorskip("transformers")
    gpt2 = roles(find_plan(build("gpt2", torch.float32), size=2))
    assert gpt2["transformer.h.1.attn.c_attn"] == gpt2["transformer.h.0.mlp.c_fc"] == "column"
    assert gpt2["transformer.h.1.attn.c_proj"] == gpt2["transformer.h.0.mlp.c_proj"] == "row"
    assert (gpt2["transformer.wte"], gpt2["lm_head"], len(gpt2)) == ("vocabulary", "head", 10)
    t5 = roles(find_plan(build("t5", torch.float32), size=2))
    assert t5["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] == "column"
    assert t5["decoder.block.1.layer.1.EncDecAttention.k"] == "column"
    mixtral = roles(find_plan(build("mixtral", torch.float32), size=2))
    assert not any("experts" in name or "gate" in name for name in mixtral)
    assert len(mixtral) == 2 * 4 + 2
    vit = roles(find_plan(build("vit", torch.float32), size=2))
    assert "classifier" not in vit and len(vit) == 12


def test_the_plan_that_llama_carries_is_the_one_that_is_found() -> None:
    pytest.importorskip("transformers")
    model = build("llama", torch.float32)
    assert find_plan(model, size=2).layers == find_plan(model, size=2, plan="found").layers


def test_a_plan_that_a_model_carries_counts_where_another_would_be_found() -> None:
    pytest.importorskip("transformers")
    model: Any = build("llama", torch.float32)
    whole = {f"model.layers.0.mlp.{part}": "replicate" for part in ("gate_proj", "up_proj", "down_proj")}
    model.tp_plan = {**whole, **model.tp_plan}
    found, followed = find_plan(model, size=2, plan="found"), find_plan(model, size=2)
    assert whole.keys() <= roles(found).keys()
    assert roles(followed) == {name: role for name, role in roles(found).items() if name not in whole}
    assert {row.why for row in followed.rows if row.name in whole} == {"the plan says so"}


def test_a_fused_projection_is_cut_in_its_three_parts() -> None:
    plan = find_plan(Nano(), size=4)
    sections = {layer.name: layer.sections for layer in plan.layers}
    assert sections["h.0.attn.c_attn"] == (32, 32, 32)
    assert sections["h.0.attn.c_proj"] == (32,)


class Attention(nn.Module):
    """One head of keys and values for all queries, or as many as there are."""

    def __init__(self, *, num_heads: int = 6, num_key_heads: int = 6, width: int = 48, fused: str = "") -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.size, self.fused = num_heads, num_key_heads, width // num_heads, fused
        inner = (num_heads + 2 * num_key_heads) * self.size
        if fused:
            self.qkv = nn.Linear(width, inner)
        else:
            self.q = nn.Linear(width, num_heads * self.size)
            self.k, self.v = (nn.Linear(width, num_key_heads * self.size) for _ in "kv")
        self.o = nn.Linear(num_heads * self.size, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.fused == "slices":
            y, n, m = self.qkv(x), self.num_heads * self.size, self.num_key_heads * self.size
            q, k, v = y[..., :n], y[..., n : n + m], y[..., n + m :]
        elif self.fused == "stacked":
            q, k, v = self.qkv(x).view(b, t, 3, -1).unbind(2)
        elif self.fused == "by_head":
            q, k, v = self.qkv(x).view(b, t, self.num_heads, 3 * self.size).chunk(3, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (one.reshape(b, t, -1, self.size).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.num_key_heads != self.num_heads)
        return self.o(out.transpose(1, 2).reshape(b, t, -1))


def block(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(48), Attention(**options), nn.LayerNorm(48)).double()


def squares(model: nn.Module) -> Tensor:
    x = seeded((2, 6, 48), torch.float64).requires_grad_()
    return (model(x) * seeded((2, 6, 48), torch.float64, 8)).sum()


@pytest.mark.parametrize("fused", ["", "slices", "stacked", "by_head"])
def test_attention_as_people_write_it(fused: str) -> None:
    model = block(fused=fused)
    plan = find_plan(model, size=3)
    assert set(roles(plan).values()) == {"column", "row"}
    assert_same_step(model, plan, squares)


def test_fewer_heads_of_keys_than_of_queries() -> None:
    model = block(num_key_heads=2)
    plan = find_plan(model, size=2)
    assert roles(plan) == {"1.q": "column", "1.k": "column", "1.v": "column", "1.o": "row"}
    assert_same_step(model, plan, squares)
    with pytest.raises(PlanError, match=r"the 2 heads of 1\.[kv] do not divide among 3 workers. Use tensor=1 or 2, "):
        find_plan(model, size=3)


def test_one_head_of_keys_is_held_by_every_worker() -> None:
    model = block(num_key_heads=1)
    plan = find_plan(model, size=3)
    assert roles(plan) == {"1.q": "column", "1.o": "row"}
    assert "one head for all queries: every worker holds it" in str(plan)
    assert_same_step(model, plan, squares)


def test_numbers_that_do_not_divide_are_refused_all_at_once() -> None:
    with pytest.raises(PlanError) as error:
        find_plan(Nano(width=30, num_heads=6), size=4)
    text = str(error.value)
    assert "Layout(tensor=4) cannot split Nano:" in text
    assert "the 6 heads of h.*.attn.c_attn do not divide among 4 workers. Use tensor=1 or 2 or 3 or 6" in text
    assert "(2 blocks.)" in text
    assert len(text.splitlines()) == 2  # 120 features of the MLP divide


@pytest.mark.parametrize("sequence", [False, True])
def test_words_and_features_that_do_not_divide_are_cut_unevenly(sequence: bool) -> None:
    torch.manual_seed(0)
    model = Nano(words=101, inner=90).double()
    plan = find_plan(model, size=4, sequence=sequence)
    assert roles(plan) == roles(find_plan(Nano(), size=4))
    row = {one.name: one for one in plan.rows}["h.0.mlp.c_fc"]
    assert row.worker_bytes == 8 * 23 * (32 + 1), "23, 23, 23 and 21 features"

    def loss(one: nn.Module) -> Tensor:
        return F.cross_entropy(one(tokens()).view(-1, 101), tokens(seed=6).view(-1) + 5)

    assert_same_step(model, plan, loss)


@pytest.mark.parametrize(("kind", "words"), [("gpt2", 101), ("bert", 99)])
def test_models_of_transformers_are_cut_along_a_vocabulary_that_does_not_divide(kind: str, words: int) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face(kind, vocab_size=words).double()
    plan = find_plan(model, size=4)
    assert [layer.role for layer in plan.layers if layer.sections == (words,)] == ["vocabulary", "head"]
    rows = {row.role: row for row in plan.rows if row.role in ("vocabulary", "head")}
    each = -(-words // 4)
    assert rows["vocabulary"].worker_bytes == 8 * each * 32
    assert rows["head"].num_bytes in (0, 8 * words), "the weight is tied: BERT's bias is left"
    assert rows["head"].worker_bytes in (0, 8 * each)
    assert_same_step(model, plan, lambda one: CASES[kind].loss(one, torch.float64))


class Gated(nn.Module):
    """Two inner vectors from one layer, of 45 features each."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 90), nn.Linear(45, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def test_sections_of_a_fused_layer_are_cut_unevenly_each() -> None:
    torch.manual_seed(0)
    model, x = Gated().double(), seeded((3, 8), torch.float64)
    plan = find_plan(model, size=4, sample=(x,))
    assert {layer.name: layer.sections for layer in plan.layers} == {"both": (45, 45), "down": (45,)}
    assert_same_step(model, plan, lambda one: one(x).square().sum())


def test_a_view_that_parts_uneven_features_otherwise_lets_them_be_cut_by_what_it_makes() -> None:
    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 18), nn.Linear(18, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).view(-1, 6, 3).softmax(-1).flatten(1))

    with pytest.raises(
        PlanError, match=r"the 6 heads of up do not divide among 4 workers\. Use tensor=1 or 2 or 3 or 6,"
    ):
        find_plan(Groups(), size=4)
    x = seeded((3, 8), torch.float64)
    plan, model = find_plan(Groups(), size=3), Groups().double()
    assert_same_step(model, plan, lambda one: one(x).square().sum())


def test_so_few_words_that_a_worker_would_have_none_stay_whole_and_so_few_features_are_refused() -> None:
    plan = find_plan(Nano(words=5), size=4, sample=(torch.ones(2, 8, dtype=torch.int64),))
    assert "wte" not in roles(plan) and "h.0.mlp.c_fc" in roles(plan)
    assert "5 tokens leave the last of 4 workers without any" in str(plan)
    with pytest.raises(
        PlanError, match=r"the 6 features of .* leave the last of 4 workers without any\. Use tensor=1 or"
    ):
        find_plan(Nano(inner=6), size=4)


def test_tokens_that_do_not_divide_are_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(PlanError, match=r"has 17 of them. Pad sequences to a multiple of 2, or use sequence=False"):
        find_plan(hugging_face("vit"), size=2, sequence=True)


def test_the_users_own_plan() -> None:
    model = Nano().double()
    own = {"h.*.mlp.c_fc": "column", "h.*.mlp.c_proj": "row", "*": "replicated"}
    plan = find_plan(model, size=2, plan=own)
    assert {name.split(".")[2] for name in roles(plan)} == {"mlp"} and len(plan.layers) == 4
    assert "the plan says so" in str(plan)
    assert_same_step(model, plan, lambda one: CASES["nano"].loss(one, torch.float64))
    others = find_plan(model, size=2, plan={"h.0.attn.*": "replicated"})
    assert "h.0.attn.c_attn" not in roles(others) and "h.1.attn.c_attn" in roles(others)


def test_mistakes_in_the_users_plan_are_told_all_at_once() -> None:
    own = {"h.*.attn.c_atn": "column", "h.*.mlp.c_fc": "colunm", "wte": "row", "h.*.attn": "column"}
    with pytest.raises(PlanError) as error:
        find_plan(Nano(), size=2, plan=own)
    text = str(error.value)
    assert "plan['h.*.attn.c_atn'] fits no layer of the model. Near it: 'h.*.attn.c_attn'" in text
    assert "'colunm'; it must be one of" in text and "Did you mean 'column'?" in text
    assert "makes wte a 'row' layer, but it is Embedding, which can be 'column' or 'vocabulary'" in text
    assert "plan['h.*.attn'] names a module that is no layer" in text


def test_a_plan_that_would_tear_a_shared_weight_is_refused() -> None:
    own = {"h.0.attn.c_attn": "row"}  # alone, that is right, only of no use
    assert_same_step(
        Nano().double(), find_plan(Nano(), size=2, plan=own), lambda one: CASES["nano"].loss(one, torch.float64)
    )
    torn = {"lm_head": "head", "wte": "replicated"}
    with pytest.raises(PlanError, match=r"plan\['lm_head'\] cannot be followed: .* is shared with lm_head and wte"):
        find_plan(Nano(), size=2, plan=torn)


class Looks(nn.Module):
    """Reads a layer's weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + self.up.weight.square().sum()


def test_a_layer_whose_weight_is_used_elsewhere_stays_whole() -> None:
    plan = find_plan(Looks(), size=2)
    assert plan.layers == ()
    assert "code outside of it uses its weight (square)" in str(plan)


def test_a_wrong_rule_cannot_change_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that is wrong on parts is noticed by the proof, and the block stays whole."""
    from paceline.parallel.tensor import op_rules

    model = nn.Sequential(nn.Linear(8, 64), nn.Softmax(-1), nn.Linear(64, 8))
    assert find_plan(model, size=2, sample=(seeded((2, 8), torch.float32),)).layers == ()
    monkeypatch.setitem(op_rules.RULES, "softmax", op_rules.RULES["tanh"])  # as if it did not need the whole
    op_rules.rule_of.cache_clear()
    try:
        plan = find_plan(model, size=2, sample=(seeded((2, 8), torch.float32),))
        assert plan.layers == ()
        assert "split, the model does not compute the same (output 0 of worker 0 is off by" in str(plan)
        monkeypatch.setattr(verify, "TOLERANCE", 1e9)  # without the proof it would have been cut
        assert len(find_plan(model, size=2, sample=(seeded((2, 8), torch.float32),)).layers) == 2
    finally:
        op_rules.rule_of.cache_clear()


def test_the_search_leaves_the_model_as_it_was() -> None:
    model = build("nano", torch.float32)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    find_plan(model, size=2, sequence=True)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.training and all(one.grad is None for one in model.parameters())
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_no_guess_fits_says_what_to_give() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, batch: Any) -> Tensor:
            if not isinstance(batch, dict):
                raise TypeError("a dictionary, please")
            return self.down(self.up(batch["x"]).relu())

    with pytest.raises(PlanError, match=r"Give a batch of two: sample=\(x,\)"):
        find_plan(Choosy(), size=2)
    given = find_plan(Choosy(), size=2, sample=({"x": torch.ones(2, 8)},))
    assert len(given.layers) == 2


def test_the_report() -> None:
    text = str(find_plan(Nano(), size=2, sequence=True))
    assert text.splitlines()[0].startswith("tensor=2, sequence=True: 10 layers are split; ")
    assert "h.*.attn.c_attn" in text and "x2  column" in text
    assert "wpe" in text and "its features reach layer_norm: layer_norm works along the split dim" in text
    assert "reduce-scatter: 10 of" in text and "all-gather: 12 of" in text
    assert "gradients summed after backward: " in text and "ln_f.weight" in text
    plan = find_plan(SkipMLP(), size=4)
    row = {one.name: one for one in plan.rows}["up"]
    assert (row.role, row.num_bytes, row.worker_bytes) == ("column", 4 * (8 * 64 + 64), 4 * (8 * 64 + 64) // 4)
    assert plan.worker_bytes == sum(one.worker_bytes for one in plan.rows)
    assert plan.collectives() == {"all_reduce": (1, 4 * 2 * 8)}


def test_inputs_and_outputs_of_nano_are_plain() -> None:
    plan = find_plan(Nano(), size=2, sequence=True)
    torch.manual_seed(0)
    model = Nano()

    def work(group: EmulatedGroup) -> tuple[type, torch.Size]:
        part = copy.deepcopy(model)
        apply_plan(part, plan, group)
        out = part(tokens())
        return type(out), out.shape

    assert emulate(2, work) == [(Tensor, torch.Size((3, 8, 96)))] * 2
