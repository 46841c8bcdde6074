"""The method `eagle`: published folders drafted by the engine, against EAGLE-2's tree grown by a plain twin."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.tree import DraftTree
from paceline.engine.core import EngineCore
from paceline.errors import InvalidOptionError
from paceline.models.drafters import paged
from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.proposer import StepContext
from paceline.train.target import DenseTarget
from tests.spec.feature.test_feature_drafters import make_core
from tests.toy import run_all, toy_core, toy_request
from tests.train.test_recipes import grow
from tests.train.tiny_target import CONFIG, tiny_target

DEPTH, WIDTH, NODES, NUM_TOKENS = 4, 3, 12, 16
PROMPTS = [[5, 9, 5, 9, 33], [61, 2, 3], [7] * 9]


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


def random_network(fc_bias: bool, input_norm: bool) -> Eagle:
    torch.manual_seed(4)
    network = Eagle(EagleConfig(replace(CONFIG, num_layers=1), CONFIG.vocab_size, (7,), fc_bias, input_norm))
    for parameter in network.midlayer.input_layernorm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return network.requires_grad_(False)


def publish(network: Eagle, target: DenseTarget, folder: Path) -> Path:
    """As SafeAILab would, the target's embedding included."""
    tensors = {name: tensor for name, tensor in network.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors | {"embed_tokens.weight": target.embedding.clone()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bias": network.config.fc_bias,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "vocab_size": CONFIG.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Node:
    path: tuple[int, ...]
    score: float  # log-probability of the path
    feature: Tensor  # what the drafter made of the path up to its parent
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def twin_tree(network: Eagle, target: DenseTarget, tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """Paths of EAGLE-2's tree: the likeliest paths of every depth go on, and the likeliest of all nodes are kept."""
    normed = target.forward(torch.tensor([list(tokens)])).normed[0]
    node = Node((), 0.0, torch.empty(0))
    for position in range(len(tokens) - 1):
        node = Node((), 0.0, normed[position], node.keys, node.values)
        node.feature = step(network, target, node, tokens[position + 1], position)
    seen: list[Node] = []
    frontier = children(target, node)
    for depth in range(1, DEPTH + 1):
        seen += frontier
        going_on = sorted(frontier, key=lambda n: -n.score)[:WIDTH]
        frontier = []
        for node in going_on if depth < DEPTH else []:
            node.feature = step(network, target, node, node.path[-1], len(tokens) - 2 + depth)
            frontier += children(target, node)
    return {node.path for node in sorted(seen, key=lambda n: -n.score)[:NODES]}


def step(network: Eagle, target: DenseTarget, node: Node, token: int, position: int) -> Tensor:
    cos, sin = target.cos[position], target.sin[position]
    feature: Tensor = network(target.embedding[token], node.feature, cos, sin, grow(node.keys, node.values))
    return feature


def children(target: DenseTarget, node: Node) -> list[Node]:
    scores, ids = (target.head @ node.feature).log_softmax(0).topk(WIDTH)
    return [
        Node((*node.path, token), node.score + score, node.feature, [*node.keys], [*node.values])
        for token, score in zip(ids.tolist(), scores.tolist(), strict=True)
    ]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def record(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], DraftTree]]:
    """A list that fills with (tokens so far, tree drafted for them) as the engine runs."""
    drafted: list[tuple[list[int], DraftTree]] = []
    ask = core.speculator.propose

    def propose(context: StepContext) -> list[DraftTree]:
        trees = ask(context)
        for request, tree in zip(context.requests, trees, strict=True):
            if request.max_draft_depth >= DEPTH:  # nearer to its end a request gets a smaller tree
                drafted.append((list(request.token_ids), tree))
        return trees

    monkeypatch.setattr(core.speculator, "propose", propose)
    return drafted


@pytest.mark.parametrize(
    ("fc_bias", "input_norm"), [(True, False), (False, False), (False, True)], ids=["published", "no-bias", "normed"]
)
def test_a_published_folder_drafts_eagle2_trees(
    fc_bias: bool, input_norm: bool, target: DenseTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "layers_available", lambda: False)  # int8 weights would reorder a few tokens
    network = random_network(fc_bias, input_norm)
    folder = publish(network, target, tmp_path)
    sizes = {"num_speculative_tokens": DEPTH, "node_budget": NODES, "draft_width": WIDTH}
    core = make_core(target, {"method": "eagle", "model": str(folder), **sizes})
    drafted = record(core, monkeypatch)
    requests = [toy_request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]
    run_all(core, requests)
    assert len(drafted) > 2 * len(PROMPTS)
    for tokens, tree in drafted:
        assert paths(tree) == twin_tree(network, target, tokens)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=str)
def test_beside_eagle3_in_a_merge(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read hidden states, of different layers, from the same pass."""
    members = [{"method": name, "model": "untrained"} for name in ("eagle", "eagle3", "medusa")]

    def batch() -> list[Any]:
        return [toy_request(str(i), [1, 2, 3 + i], max_tokens=12, seed=i, **params) for i in range(4)]

    core = toy_core({"method": "merge", "members": [*members, "ngram"]}, num_blocks=256)
    drafted = record(core, monkeypatch)
    assert run_all(core, batch()) == run_all(toy_core(num_blocks=256), batch())
    drafters = {name for _, tree in drafted for names in tree.members or [] for name in names}
    assert {"eagle", "eagle3"} <= drafters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_sampling": "sampled"}, "drafts chains"),
        ({"draft_width": 0}, "draft_width"),
        ({"model": ""}, "model"),
        ({"tree_widths": [2, 2]}, "does not belong to method 'eagle' but to draft_model"),
        ({"rejection_sample_method": "block"}, "drafts chains"),
        ({"draft_widht": 4}, "draft_width"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        SpeculativeConfig.parse({"method": "eagle", **options})
