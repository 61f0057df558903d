"""The command line: ``loraproxy serve``, ``demo``, ``config-schema``, ``bench``, and the commands on files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from loraproxy import __version__, logs
from loraproxy.config import Config, ConfigError, LogConfig
from loraproxy.config_file import check_config, load_config
from loraproxy.errors import ApiError, CommandFailed, StartFailed
from loraproxy.llama_args import add_llama_server_options, normalise
from loraproxy.spelling import nearest

log = logging.getLogger("loraproxy")

USAGE_ERROR = 2
START_ERROR = 1

_OPTIONS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("--model", "-m"), "model", "FILE", "the base model (GGUF); with --backend ollama its name there"),
    (("--alias", "-a"), "alias", "NAME", "the base model's public name; several separated by commas"),
    (("--adapters-dir",), "adapters_dir", "DIR", "register the adapters in this folder, and watch it for changes"),
    (("--adapter-memory",), "adapter_memory", "SIZE", "memory for loaded adapters; 0: no limit (1GiB)"),
    (("--upload-dir",), "upload_dir", "DIR", "where uploaded adapters are kept (in ~/.local/share/loraproxy)"),
    (("--max-adapter-size",), "max_adapter_size", "SIZE", "largest adapter that may be uploaded (2GiB)"),
    (("--host",), "http.host", "HOST", "address to listen on, or a unix socket's path ending in .sock (127.0.0.1)"),
    (("--port",), "http.port", "PORT", "port to listen on; 0 takes a free one (8080)"),
    (("--api-key-file",), "http.api_key_file", "FILE", "file with one API key a line"),
    (("--cors-origins",), "http.cors.origins", "ORIGINS", "`*`, `localhost`, or the allowed origin (*)"),
    (("--cors-methods",), "http.cors.methods", "METHODS", "methods a preflight allows"),
    (("--cors-headers",), "http.cors.headers", "HEADERS", "headers a preflight allows"),
    (("--max-queue",), "http.max_queue", "N", "requests that may wait; more are answered 503 (256)"),
    (("--max-body",), "http.max_body", "SIZE", "largest request body (32MiB)"),
    (("--drain-timeout",), "http.drain_timeout", "TIME", "how long SIGTERM or Ctrl-C lets requests finish (30s)"),
    (("--log-format",), "log.format", "FORMAT", "text, or json: one object a line (text)"),
    (("--log-level",), "log.level", "LEVEL", "debug, info, warning or error (info)"),
    (("--parallel", "-np"), "engine.parallel", "N", "slots: requests in one batch (8)"),
    (("--ctx-size", "-c"), "engine.ctx_size", "N", "tokens of context over all slots (0: up to 4096 for each)"),
    (("--threads", "-t"), "engine.threads", "N", "threads of the engine (0: one for each CPU)"),
    (
        ("--threads-batch", "-tb"),
        "engine.threads_batch",
        "N",
        "overrides --threads: prompts and steps share one pool (0: as --threads)",
    ),
    (("--batch-size", "-b"), "engine.batch_size", "N", "logical batch size (2048)"),
    (("--ubatch-size", "-ub"), "engine.ubatch_size", "N", "physical batch size (512)"),
    (("--gpu-layers", "-ngl", "--n-gpu-layers"), "engine.gpu_layers", "N", "layers on the GPU, or `all` (0)"),
    (("--cache-ram", "-cram"), "engine.cache_ram", "MIB", "memory for the prompt cache in MiB; 0 disables it (512)"),
    (
        ("--lora-mode",),
        "engine.lora_mode",
        "MODE",
        "delta (all in one batch), or graph: for MoE experts, recurrent models",
    ),
    (("--adapter-type",), "engine.adapter_type", "TYPE", "auto (adapters in 8 bits on a quantised base), or f16"),
    (("--backend",), "backend.kind", "KIND", "what generates: embedded, llama-server or ollama (embedded)"),
    (("--backend-bin",), "backend.bin", "PROGRAM", "a llama-server to start; its own arguments may follow after --"),
    (("--max-workers",), "pool.max_workers", "N", "workers that run one adapter set each at once (4)"),
    (("--memory-budget",), "pool.memory_budget", "SIZE", "memory for all such workers; 0: no limit (0)"),
    (("--idle-timeout",), "pool.idle_timeout", "TIME", "such a worker ends when nobody uses it for so long (5m)"),
    (("--backend-api-key",), "backend.api_key", "KEY", "what the llama-servers at --backend-url ask for"),
)
"""Options that set one key of the configuration: their spellings, the key, and the help."""

_SWITCHES: tuple[tuple[tuple[str, ...], str, bool, str], ...] = (
    (("--ignore-unsupported",), "ignore_unsupported", True, "apply the rest of adapters that have unsupported parts"),
    (("--strict-models",), "strict_models", True, "refuse requests whose `model` is neither base nor adapter"),
    (("--log-requests",), "log.requests", True, "log a line for every finished request"),
    (("--cors-credentials",), "http.cors.credentials", True, argparse.SUPPRESS),
    (("--no-cors-credentials",), "http.cors.credentials", False, "do not allow credentials"),
    (("--mmap",), "engine.mmap", True, argparse.SUPPRESS),
    (("--no-mmap",), "engine.mmap", False, "read the model file instead of mapping it"),
    (("--no-fast-products",), "engine.fast_products", False, "multiply quantised weights by llama.cpp's own kernels"),
    (("--repack",), "engine.repack", True, "let llama.cpp repack weights (faster on some machines, crashes on others)"),
    (("--no-repack", "-nr"), "engine.repack", False, argparse.SUPPRESS),
)

_OPTION_OF = {key: spellings[0] for spellings, key, *_ in _OPTIONS}
"""The option that sets a key, to name it in messages."""

_AUTO_VALUES = {("engine.parallel", "-1"): "8", ("engine.threads", "-1"): "0", ("engine.threads_batch", "-1"): "0"}
"""llama-server's ways to say "you choose"."""


class _Set(argparse.Action):
    """Put the value (or ``const``) under the option's key in ``namespace.overrides``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        key = self.dest
        value = values if self.const is None else self.const
        if key == "http.host" and "," in values:
            parser.error("--host takes one address")
        if key == "engine.cache_ram" and str(value).isdigit():
            value = f"{value}MiB"
        namespace.overrides = {**namespace.overrides, key: _AUTO_VALUES.get((key, value), value)}


class _Adapter(argparse.Action):
    """Collect ``--adapter``, ``--lora`` and ``--lora-scaled`` in the order given, which is that of their ids."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        found: list[tuple[str | None, str, float]] = []
        if option == "--adapter":
            name, equals, path = values.partition("=")
            if not (name and equals and path):
                parser.error(f"--adapter takes NAME=PATH, not {values!r}")
            found.append((name, path, 0.0))
        elif option == "--lora":
            found += [(None, path, 1.0) for path in values.split(",") if path]
        else:
            for item in values.split(","):
                path, colon, scale = item.rpartition(":")
                try:
                    found.append((None, path, float(scale)))
                except ValueError:
                    colon = ""
                if not colon or not path:
                    parser.error(f"--lora-scaled takes FNAME:SCALE,..., not {item!r}")
        namespace.adapters = [*namespace.adapters, *found]


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest known option for an unknown one."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``arguments`` or end with exit code 2."""
        for argument in arguments:
            # argparse would take -td for -t with the value d; llama-server has no such form.
            if re.fullmatch(r"-[A-Za-z]{2,}", argument) and argument not in self._option_string_actions:
                self._unknown(argument)
        namespace, unknown = self.parse_known_args(arguments)
        for argument in unknown:
            self._unknown(argument)
        return namespace

    def _unknown(self, argument: str) -> NoReturn:
        option = argument.partition("=")[0]
        if not option.startswith("-"):
            self.error(f"unexpected {argument!r}: every value follows its option, as in --model FILE")
        if option.startswith("--spec-") or "draft" in option:
            self.error(f"llama-server's {option} is not supported: there is one model, without a draft model")
        close = nearest(option, self._option_string_actions)
        self.error(f"unknown argument {argument!r}" + (f"; did you mean {close}?" if close else ""))

    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(USAGE_ERROR, f"error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 (cannot start) or 2 (wrong usage or configuration)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": _serve,
        "demo": _demo,
        **{name: partial(_tool, name) for name in _TOOLS},
        "config-schema": _config_schema,
        "bench": _bench,
    }
    if command in ("--version", "-V"):
        print(f"loraproxy {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_HELP)
        return 0 if arguments else USAGE_ERROR
    if command not in commands:
        close = nearest(command, commands)
        hint = f"; did you mean {close!r}?" if close else f"; known: {', '.join(commands)}"
        return _fail(f"unknown command {command!r}{hint}", USAGE_ERROR)
    try:
        code = commands[command](rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read it, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        return _fail(str(error), USAGE_ERROR)
    except (StartFailed, CommandFailed) as error:
        return _fail(str(error), START_ERROR)
    except KeyboardInterrupt:
        return 130


_TOOLS = ("inspect", "convert", "merge")
"""Commands that are modules of loraproxy.tools."""

_HELP = """usage: loraproxy COMMAND [options]

  serve          serve one base model with many LoRA adapters
  demo           serve the packaged SmolLM2 with four characters on 127.0.0.1:8080
  inspect        what an adapter file is, what it targets, whether it fits a base model
  convert        a PEFT folder as a GGUF adapter that llama.cpp loads with the same result
  merge          a base model with adapters added to its weights
  config-schema  print the JSON schema of the configuration file
  bench          measure the product beside llama-server

loraproxy COMMAND --help tells more; loraproxy --version prints the version."""


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(line if line.startswith(" ") else f"error: {line}", file=sys.stderr)
    return code


def _add_options(parser: argparse.ArgumentParser, keys: set[str] | None = None) -> None:
    """Add the options that set configuration keys; only those of ``keys`` where it is given."""
    parser.set_defaults(overrides={})
    for spellings, key, metavar, text in _OPTIONS:
        if keys is None or key in keys:
            parser.add_argument(
                *spellings, action=_Set, dest=key, metavar=metavar, help=text, default=argparse.SUPPRESS
            )
    parser.add_argument("-v", "--verbose", "--log-verbose", action="store_true", help="log more")


def serve_parser() -> _Parser:
    """The parser of ``loraproxy serve``."""
    parser = _Parser(
        prog="loraproxy serve",
        allow_abbrev=False,
        description="Serve one base model with many LoRA adapters. llama-server's options are understood, too.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; options given here override it")
    parser.set_defaults(adapters=[])
    help_of = {
        "--adapter": ("NAME=PATH", "register an adapter (GGUF file or PEFT folder) under a name; repeatable"),
        "--lora": ("FNAME", "as in llama-server: register adapters that requests without a selector run under"),
        "--lora-scaled": ("FNAME:SCALE", "as --lora, with a scale"),
    }
    for option, (metavar, text) in help_of.items():
        parser.add_argument(option, action=_Adapter, dest="adapters", metavar=metavar, help=text)
    parser.add_argument("--lora-init-without-apply", action="store_true", help="register --lora adapters at scale 0")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="repeatable, or comma-separated")
    parser.add_argument(
        "--backend-url",
        action="append",
        default=[],
        metavar="URL",
        help="with --backend llama-server: one that runs already; repeatable; with --backend ollama: the server",
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="NAME",
        help="an adapter loaded before the first request; it has a worker at all times where each runs one; repeatable",
    )
    parser.add_argument(
        "--adapter-root",
        action="append",
        default=[],
        metavar="DIR",
        help="let the API register adapters in this folder; repeatable",
    )
    parser.add_argument("-lm", "--load-mode", choices=["auto", "none", "mmap"], help=argparse.SUPPRESS)
    _add_options(parser)
    for spellings, key, value, text in _SWITCHES:
        parser.add_argument(
            *spellings, action=_Set, dest=key, nargs=0, const=value, help=text, default=argparse.SUPPRESS
        )
    add_llama_server_options(parser)
    return parser


def config_from_arguments(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The configuration of ``loraproxy serve``: the file's, overridden by the options. Raises ConfigError."""
    own = list(arguments)
    own, passed_on = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    options = serve_parser().parse(normalise(own))
    base = load_config(options.config) if options.config else Config()
    overrides = dict(options.overrides)
    if options.load_mode:
        overrides["engine.mmap"] = options.load_mode != "none"
    keys = [key for given in options.api_key for key in given.split(",") if key]
    if keys:
        overrides["http.api_keys"] = keys
    if options.backend_url:
        overrides["backend.urls"] = options.backend_url
    if passed_on:
        overrides["backend.args"] = passed_on
    if options.preload:
        overrides["pool.preload"] = options.preload
    if options.adapter_root:
        overrides["adapter_roots"] = options.adapter_root
    data = _merge(base, overrides)
    data["adapters"] = _merge_adapters(data["adapters"], options)
    config = check_config(data, "command line", _OPTION_OF)
    if config.model is None and config.backend.kind == "ollama":
        raise ConfigError("no base model: give --model NAME, one that `ollama list` shows")
    if config.model is None and not config.backend.urls:
        raise ConfigError("no base model: give --model FILE, or `model:` in the configuration file")
    return config, options


def _merge(base: Config, overrides: Mapping[str, object]) -> dict[str, Any]:
    data = base.model_dump()
    for key, value in overrides.items():
        *sections, name = key.split(".")
        target = data
        for section in sections:
            target = target[section]
        target[name] = value
    return data


def _merge_adapters(known: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The file's adapters, then the command line's: those with a name of the file's replace it."""
    given: dict[str, Any] = {}
    for name, path, scale in options.adapters:
        if name is None:
            name = _free_name(Path(path), known.keys() | given.keys())
        elif name in given:
            raise ConfigError(f"--adapter: the name {name!r} is given twice")
        given[name] = {"path": path, "scale": 0.0 if options.lora_init_without_apply else scale}
    return {**known, **given}


def _free_name(path: Path, taken: set[str]) -> str:
    """The file's stem or the folder's name, in the alphabet of names; numbered where it is taken."""
    base = path.stem if path.suffix.lower() == ".gguf" else path.name
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._") or "lora"
    name, number = base[:60], 2
    while name in taken:
        name, number = f"{base[:60]}-{number}", number + 1
    return name


def _set_up_log(config: LogConfig, verbose: bool) -> None:
    logs.set_up(config.format, "debug" if verbose else config.level)
    if config.requests:
        logs.show_requests()


def _serve(arguments: Sequence[str]) -> int:
    from loraproxy.proxy.server import run

    config, options = config_from_arguments(arguments)
    _set_up_log(config.log, options.verbose)
    if options.ignored:
        log.warning("ignored, as they change nothing here: %s", " ".join(dict.fromkeys(options.ignored)))
    return run(config, lambda url: print(f"listening on {url}", flush=True))


def _demo(arguments: Sequence[str]) -> int:
    from loraproxy.demonstration import curl_lines, demo_config
    from loraproxy.proxy.server import run

    parser = _Parser(prog="loraproxy demo", allow_abbrev=False, description="Serve SmolLM2 with four characters.")
    _add_options(parser, {"http.host", "http.port", "engine.threads", "engine.parallel"})
    options = parser.parse(arguments)
    config = check_config(_merge(demo_config(), options.overrides), "command line", _OPTION_OF)
    _set_up_log(config.log, options.verbose)
    return run(config, lambda url: print(curl_lines(url), flush=True))


def _tool(name: str, arguments: Sequence[str]) -> int:
    tool: Any = importlib.import_module(f"loraproxy.tools.{name}")
    parser = _Parser(prog=f"loraproxy {name}", allow_abbrev=False, description=tool.DESCRIPTION)
    tool.add_arguments(parser)
    options = parser.parse(arguments)
    try:
        code: int = tool.run(options)
    except ApiError as error:
        raise CommandFailed(error.message) from None
    return code


def _config_schema(arguments: Sequence[str]) -> int:
    _Parser(prog="loraproxy config-schema", description="Print the configuration's JSON schema.").parse(arguments)
    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def _bench(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("loraproxy.bench") is None:
        raise StartFailed("this installation has no benchmark")
    bench: Any = importlib.import_module("loraproxy.bench")
    code: int = bench.main(arguments)
    return code
