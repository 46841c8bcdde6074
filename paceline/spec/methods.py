"""The table of drafting methods. Adding one is a file in one of the folders beside this one, and a row here.

A row names the class (imported when it is first used), says in a line what the method does, and lists the options that
belong to it. Every method has `num_speculative_tokens` (the longest path) and `node_budget` (nodes in a tree).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.spec.config.method import (
    BY_PRICE,
    Loaded,
    Method,
    check_widths,
    derive_from_widths,
    feature_method,
    model_options,
    size,
)
from paceline.spec.config.options import Option, chance_table, choice, either, optional, real, whole, whole_list
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.credit import check_rows
from paceline.spec.proposer import Proposer

NOT_MEMBERS = ("none", "merge", "auto", "lookahead")
TRAINING_FREE = (
    "prediction",
    "grammar",
    "suffix",
    "recycling",
)  # members that any target has; suffix finds what ngram finds


def _check_ngram(options: Mapping[str, Any]) -> None:
    low, high = options["prompt_lookup_min"], options["prompt_lookup_max"]
    if low > high:
        raise InvalidOptionError(
            f"prompt_lookup_min {low} is above prompt_lookup_max {high}: lower the first or raise the second"
        )


def _check_draft_model(options: Mapping[str, Any]) -> None:
    if options["model"] is not None and options["num_draft_layers"] is not None:
        raise InvalidOptionError(
            "draft_model takes either 'model', the draft model's name, folder or drafter file, or 'num_draft_layers', "
            f"to draft with the target's own first layers; got {options['model']!r} and {options['num_draft_layers']!r}"
        )
    check_widths(options)


def _model(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value) and not isinstance(value, Loaded):
        raise InvalidOptionError(f"{name} must be a model's name, folder or file, got {value!r}")
    return value


def _members(name: str, value: Any) -> Any:
    """Names or configurations, parsed. A merge of merges would hide which drafted what; a window must stay whole."""
    from paceline.spec.config.speculative_config import SpeculativeConfig  # reads this table

    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidOptionError(f"{name} must be a list such as ['ngram', 'suffix'], got {value!r}")
    for member in value:
        method = member.get("method") if isinstance(member, Mapping) else member
        method = method.method if isinstance(method, SpeculativeConfig) else method
        if method in NOT_MEMBERS:
            raise InvalidOptionError(
                f"{name} must be drafting methods other than {', '.join(NOT_MEMBERS)}; got {method!r}"
            )
    return tuple(SpeculativeConfig.parse(member) for member in value)


def _share_size(given: dict[str, Any]) -> dict[str, Any]:
    """A member may fill the whole tree, unless it was given a size of its own."""
    row = PROPOSERS[given["method"]]
    sizes = {key: given.get(key, row.default(key)) for key in ("num_speculative_tokens", "node_budget")}
    members = given.get("members", row.default("members"))
    if isinstance(members, str) or not isinstance(members, Sequence):
        return given  # the option's own check says what is wrong with it
    shared = []
    for member in members:
        own = {"method": member} if isinstance(member, str) else member
        shared.append(sizes | dict(own) if isinstance(own, Mapping) and "tree_widths" not in own else own)
    return given | {"members": shared}


def _lookahead_size(given: dict[str, Any]) -> dict[str, Any]:
    """The window's and the guesses' nodes, if all three sizes are usable."""
    row = PROPOSERS["lookahead"]
    sizes = [given.get(key, row.default(key)) for key in ("window_size", "ngram_size", "guess_set_size")]
    if not all(isinstance(number, int) for number in sizes):
        return given
    width, n, guesses = sizes
    return {"num_speculative_tokens": width + n - 2, "node_budget": (n - 1) * (width + guesses)} | given


def _check_lookahead(options: Mapping[str, Any]) -> None:
    width, n, guesses = options["window_size"], options["ngram_size"], options["guess_set_size"]
    nodes, depth = (n - 1) * (width + guesses), width + n - 2
    if nodes > options["node_budget"] or depth > options["num_speculative_tokens"]:
        raise InvalidOptionError(
            f"window_size {width}, ngram_size {n} and guess_set_size {guesses} need {nodes} nodes and depth {depth}; "
            f"there are {options['node_budget']} (node_budget) and {options['num_speculative_tokens']}: "
            "leave these two out, or choose smaller sizes"
        )


PROPOSERS: dict[str, Method] = {
    "none": Method("paceline.spec.baseline.none:NoProposer", "plain decoding", drafts=False, priced=False),
    "ngram": Method(
        "paceline.spec.lookup.ngram:NgramProposer",
        "prompt lookup: copy what followed the last tokens where they stood before",
        size(4, 4)
        | {
            "prompt_lookup_min": Option(1, whole(1, 32), "shortest n-gram looked up"),
            "prompt_lookup_max": Option(3, whole(1, 32), "longest n-gram looked up"),
        }
        | BY_PRICE,
        cross_check=_check_ngram,
        chain=lambda options: bool(options["node_budget"] <= options["num_speculative_tokens"]),
    ),
    "suffix": Method(
        "paceline.spec.lookup.suffix:SuffixProposer",
        "suffix decoding: all places where the text's end stood before, here or in past outputs, vote",
        size(16, 16)
        | {
            "suffix_decoding_max_tree_depth": Option(24, whole(1, 128), "longest match looked for"),
            "suffix_decoding_max_cached_requests": Option(10_000, whole(0, 10**9), "past outputs kept, 0: none"),
            "suffix_decoding_max_cached_tokens": Option(1 << 18, whole(0, 1 << 30), "tokens of past outputs kept"),
            "suffix_decoding_max_spec_factor": Option(4.0, real(0.0, 64.0), "draft length over match length"),
            "suffix_decoding_min_token_prob": Option(0.03, real(0.0, 1.0), "least probability of a path"),
        },
    ),
    "prediction": Method(
        "paceline.spec.lookup.prediction:PredictionProposer",
        "the client's expected text, realigned after each mismatch",
        size(24, 24),
        told_by="prediction",
    ),
    "grammar": Method(
        "paceline.spec.lookup.grammar:GrammarProposer",
        "what the request's grammar (structured_outputs) leaves no choice about",
        size(24, 24),
        told_by="structured_outputs",
    ),
    "recycling": Method(
        "paceline.spec.recycle.recycling:RecyclingProposer",
        "token recycling: the target's own likeliest successors of each token fill a tree",
        size(6, 40)
        | {
            "recycling_top_k": Option(8, whole(1, 64), "successors kept for each token"),
            "recycling_acceptance": Option(
                None, optional(chance_table), "shape the tree by these chances, by depth and rank; without: measured"
            ),
        },
    ),
    "draft_model": Method(
        "paceline.spec.model.draft_model:DraftModelProposer",
        "a smaller model, or the target's first layers, drafts a chain or a tree",
        model_options()
        | {
            "model": Option(
                None, optional(_model), "the draft model; without: the distilled one shipped for the target"
            ),
            "num_draft_layers": Option(None, optional(whole(1, 1000)), "instead: the target's own first layers"),
            "draft_quantization": Option(
                "auto", choice("auto", "int4", "file"), "of the model, on the native CPU kernels; auto: 4 bits if large"
            ),
            "draft_min_prob": Option(
                0.0, real(0.0, 1.0), "a path less likely than this, by the model, is not drafted on"
            ),
        },
        derive=derive_from_widths,
        cross_check=_check_draft_model,
        chain=lambda options: options["tree_widths"] is None,
        per_request=False,
        example={"num_draft_layers": 1},
    ),
    "eagle": feature_method(
        "paceline.spec.feature.eagle:EagleProposer",
        "EAGLE-1 and 2: a trained layer predicts the target's last hidden state; its head scores the tree",
        depth=6,
        nodes=8,
        options=BY_PRICE,
    ),
    "eagle3": feature_method(
        "paceline.spec.feature.eagle3:Eagle3Proposer",
        "a trained layer on the target's hidden states; the tree grows where it is sure",
        depth=6,
        nodes=6,
        options=BY_PRICE,
    ),
    "medusa": feature_method(
        "paceline.spec.feature.medusa:MedusaProposer",
        "trained heads on the target's last hidden state guess several tokens at once",
        depth=4,
        nodes=8,
        options=BY_PRICE,
    ),
    "dflash": feature_method(
        "paceline.spec.feature.dflash:DFlashProposer",
        "a trained network fills in a block of masks behind the last token",
        depth=7,
        nodes=8,
    ),
    "layer_skip": Method(
        "paceline.spec.model.layer_skip:LayerSkipProposer",
        "self-speculation: some of the target's layers draft, on its own KV",
        model_options()
        | {"draft_layers": Option(None, optional(whole_list(0, 1000)), "layers that draft; else the tuned ones")}
        | BY_PRICE,
        derive=derive_from_widths,
        cross_check=check_widths,
        chain=lambda options: options["tree_widths"] is None,
        per_request=False,
    ),
    "lookahead": Method(
        "paceline.spec.recycle.lookahead:LookaheadProposer",
        "Jacobi window and n-gram pool, verified in the same pass",
        {
            "window_size": Option(8, whole(1, 64), "W: columns of the window"),
            "ngram_size": Option(4, whole(2, 16), "N: length of the n-grams; the window has N - 1 levels"),
            "guess_set_size": Option(6, whole(1, 64), "G: n-grams of the pool verified in one pass"),
        }
        | size(11, 42),
        derive=_lookahead_size,
        cross_check=_check_lookahead,
    ),
    "merge": Method(
        "paceline.spec.merge.merge:MergeProposer",
        "several methods on one tree; the budget goes to the likeliest nodes",
        size(16, 32)
        | {
            "members": Option(("ngram", "suffix", "recycling"), _members, "names or configurations"),
            "credit": Option((), check_rows, "the members' record to start with, as `paceline tune tree` writes it"),
        },
        derive=_share_size,
    ),
    "auto": Method(
        "paceline.spec.auto.controller:AutoProposer",
        "as merge, but each step drafts only what pays by the costs and acceptance measured so far",
        size(16, 24)
        | {"members": Option(None, optional(_members), "names or configurations; without: all this target has")},
        derive=_share_size,
        per_request=False,  # it measures the model before anything runs
        priced=False,  # it is what finds the price
        by_time=True,
    ),
    "oracle": Method(
        "paceline.spec.baseline.oracle:OracleProposer",
        "drafts known outputs with a chosen accuracy and tree shape: for tests and the lab",
        size(4, 64)
        | {
            "sequences": Option((), lambda name, value: value, "prompt + output token ids, known beforehand"),
            "accuracy": Option(1.0, real(0.0, 1.0), "chance that the true token is among a true node's children"),
            "shape": Option("chain", either(choice("chain", "random"), whole_list(1, 64)), "or widths by depth"),
            "seed": Option(0, whole(0, 2**63 - 1), "of the wrong tokens, and of where the true one stands"),
        },
        chain=lambda options: options["shape"] == "chain",
        per_request=False,
        priced=False,
        told_by="sequences",
    ),
}


def build_proposer(method: str, services: EngineParts, options: Mapping[str, Any]) -> Proposer:
    return PROPOSERS[method].build(services, options)
