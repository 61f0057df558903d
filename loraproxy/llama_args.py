"""llama-server's options that ``loraproxy serve`` does not have itself.

Its command lines are to be reusable: what changes nothing here is accepted and ignored (one warning names
it), what would change answers is refused with the reason. The options are those of ``llama-server --help``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


_IGNORED_FLAGS = _words("""
-cb --cont-batching --metrics --slots --webui --no-webui --ui --no-ui --jinja --warmup --no-warmup --mlock
--perf --no-perf -e --escape --no-escape --swa-full -kvo --kv-offload -nkvo --no-kv-offload --no-host
--check-tensors -cmoe --cpu-moe --op-offload --no-op-offload --offline --log-disable --log-jsonl --no-log-jsonl
--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --cache-prompt --no-cache-prompt
--cache-idle-slots --no-cache-idle-slots -no-kvu --no-kv-unified --no-context-shift --spm-infill --reuse-port
--no-mmproj --no-mmproj-auto --prefill-assistant --no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent
--mmproj-auto --mmproj-offload --no-mmproj-offload --no-skip-chat-parsing --reasoning-preserve
--no-reasoning-preserve --models-autoload --no-models-autoload
""")

_IGNORED_VALUES = _words("""
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch --numa -dt --defrag-thold -lzm --lazy-mode -ncmoe --n-cpu-moe
-ncffn --n-cpu-ffn -fit --fit -fitt --fit-target -fitc --fit-ctx --log-file --log-colors -lv --verbosity
--log-verbosity -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --cache-reuse
-sps --slot-prompt-similarity -to --timeout --threads-http --sse-ping-interval --tags --keep --pooling
--embd-normalize --log-prompts-dir --ui-config --webui-config --ui-config-file --webui-config-file
-mmdev --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir --models-max
""")

_IGNORED_OPTIONAL_VALUES = ("-fa", "--flash-attn")

_IGNORED_AT_DEFAULT = {
    "-n": ("-1",),
    "--predict": ("-1",),
    "--n-predict": ("-1",),
    "-s": ("-1",),
    "--seed": ("-1",),
    "-dev": ("none",),
    "--device": ("none",),
    "-ctk": ("f16",),
    "--cache-type-k": ("f16",),
    "-ctv": ("f16",),
    "--cache-type-v": ("f16",),
    "--reasoning-format": ("none", "auto"),
    "--reasoning-budget": ("-1",),
    "--sleep-idle-seconds": ("-1",),
    "--spec-type": ("none",),
}

_IN_REQUESTS = "give it in the request instead"
_DOWNLOAD = "download the file and give it with --model"
_ONE_MODEL = "there is one model, without a draft model"
_NOT_HERE = "this server does not have it"

_REFUSED_VALUES = {
    **dict.fromkeys(
        _words("""--samplers --sampler-seq --sampling-seq --temp --temperature --top-k --top-p --min-p --top-nsigma
        --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty
        --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
        --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range
        --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file
        -j --json-schema -jf --json-schema-file -r --reverse-prompt --chat-template-kwargs"""),
        _IN_REQUESTS,
    ),
    **dict.fromkeys(
        _words("-mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token"), _DOWNLOAD
    ),
    **dict.fromkeys(
        _words("""-md --model-draft --spec-draft-model --spec-draft-n-max --spec-draft-n-min --draft --draft-max
        --draft-min -ngld --gpu-layers-draft -lcs --lookup-cache-static -lcd --lookup-cache-dynamic"""),
        _ONE_MODEL,
    ),
    **dict.fromkeys(
        _words("""--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
        --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --rpc -ot --override-tensor --override-kv
        -sm --split-mode -ts --tensor-split -mg --main-gpu --control-vector --control-vector-scaled
        -mm --mmproj -mmu --mmproj-url --chat-template --chat-template-file --slot-save-path --media-path
        --models-dir --models-preset --path --api-prefix --tools --mcp-servers-config --mcp-servers-json
        --ssl-key-file --ssl-cert-file -rea --reasoning --reasoning-effort --reasoning-budget-message
        --kv-unified-per-slot"""),
        _NOT_HERE,
    ),
}

_REFUSED_FLAGS = dict.fromkeys(
    _words("""--no-jinja --embedding --embeddings --rerank --reranking --props --no-slots -nocb --no-cont-batching
    --context-shift -kvu --kv-unified -sp --special --ignore-eos -bs --backend-sampling --skip-chat-parsing
    --no-prefill-assistant --ui-mcp-proxy --webui-mcp-proxy -ag --agent --list-devices"""),
    _NOT_HERE,
)


class _Ignore(argparse.Action):
    """Note that the option was given; its value, if it has one, is dropped."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.ignored = [*namespace.ignored, option]


class _Refuse(argparse.Action):
    """End with an error that says why the option is not supported; a value in ``const`` is ignored instead."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if self.const and values in self.const:
            namespace.ignored = [*namespace.ignored, option]
            return
        parser.error(f"llama-server's {option} is not supported: {self.metavar}")


def add_llama_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``parser``, hidden from its help; ``namespace.ignored`` lists those that were ignored."""
    parser.set_defaults(ignored=[])

    def add(option: str, action: type[argparse.Action], nargs: int | str | None, reason: str = "", **more: Any) -> None:
        parser.add_argument(
            option,
            action=action,
            nargs=nargs,
            dest=argparse.SUPPRESS,
            metavar=reason or None,
            help=argparse.SUPPRESS,
            **more,
        )

    for option in _IGNORED_FLAGS:
        add(option, _Ignore, 0)
    for option in _IGNORED_VALUES:
        add(option, _Ignore, None)
    for option in _IGNORED_OPTIONAL_VALUES:
        add(option, _Ignore, "?")
    for option, harmless in _IGNORED_AT_DEFAULT.items():
        reason = _IN_REQUESTS if option in ("-n", "--predict", "--n-predict", "-s", "--seed") else _NOT_HERE
        add(option, _Refuse, None, reason, const=harmless)
    for option, reason in _REFUSED_VALUES.items():
        add(option, _Refuse, None, reason)
    for option, reason in _REFUSED_FLAGS.items():
        add(option, _Refuse, 0, reason)
    add("--control-vector-layer-range", _Refuse, 2, _NOT_HERE)


def normalise(arguments: Sequence[str]) -> list[str]:
    """llama-server reads ``--ctx_size`` as ``--ctx-size``."""
    return [
        "-".join(argument.split("_")) if argument.startswith("--") and "=" not in argument else argument
        for argument in arguments
    ]
