import json
import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest

from gguf_tools import make_tiny_llama
from loraproxy import __version__
from loraproxy.cli import config_from_arguments, main
from loraproxy.config import ConfigError


def config(*arguments: str):
    return config_from_arguments(["-m", "base.gguf", *arguments])[0]


def usage_error(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        config(*arguments)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "one line, no traceback"
    return message


def test_the_short_and_long_spellings_of_llama_server_mean_the_same():
    short = config(*split("-c 4096 -np 4 -t 2 -tb 3 -b 512 -ub 256 -ngl 99 -a name -cram 64 -nr"))
    long = config(
        *split("--ctx-size 4096 --parallel 4 --threads 2 --threads-batch 3 --batch-size 512 --ubatch-size 256"),
        *split("--n-gpu-layers 99 --alias name --cache-ram 64 --no-repack"),
    )
    assert short == long
    engine = short.engine
    assert (engine.ctx_size, engine.parallel, engine.threads, engine.threads_batch) == (4096, 4, 2, 3)
    assert (engine.batch_size, engine.ubatch_size, engine.gpu_layers) == (512, 256, 99)
    assert engine.cache_ram == 64 * 1024**2


def test_the_options_for_adapters_that_come_and_go(tmp_path):
    read = config(
        *split("--adapters-dir d --adapter-root a --adapter-root b --upload-dir u --max-adapter-size 1G"),
        *split("--adapter-memory 512MiB --ignore-unsupported"),
    )
    assert (read.adapters_dir, read.upload_dir) == (Path("d"), Path("u"))
    assert read.adapter_roots == (Path("a"), Path("b"))
    assert (read.max_adapter_size, read.adapter_memory) == (1024**3, 512 * 1024**2)
    assert read.ignore_unsupported
    assert config().adapter_memory == 1024**3
    file = tmp_path / "c.yaml"
    file.write_text("adapter_roots: [x]\nadapters: {a: {path: p, description: who it is}}")
    assert config("--config", str(file)).adapter_roots == (tmp_path / "x",)
    assert config("--config", str(file), "--adapter-root", "y").adapter_roots == (Path("y"),)
    assert config("--config", str(file)).adapters["a"].description == "who it is"


def test_the_options_for_workers_that_run_one_set_each():
    pool = config(*split("--max-workers 2 --memory-budget 4G --idle-timeout 10m --preload a --preload base")).pool
    assert (pool.max_workers, pool.memory_budget, pool.idle_timeout) == (2, 4 * 1024**3, 600)
    assert pool.preload == ("a", "base")


def test_underscores_are_read_as_dashes_as_llama_server_does():
    assert config("--ctx_size", "512").engine.ctx_size == 512


def test_automatic_values_of_llama_server_are_the_defaults():
    assert config("-np", "-1", "-t", "-1", "-ngl", "auto").engine == config("-ngl", "all").engine


def test_a_whole_llama_server_command_line_is_understood():
    line = (
        "-m m.gguf -c 8192 -np 8 -t 2 -cb -fa on --metrics --slots --no-webui --jinja --host 0.0.0.0 --port 9000 "
        "--api-key a,b --no-mmap --lora x/one.gguf --lora-scaled two.gguf:0.5 --threads-http 4 -lv 1 --seed -1 "
        "--cont-batching --mlock --cache-type-k f16 --device none --no-warmup -to 600"
    )
    read, options = config_from_arguments(split(line))
    assert (read.http.host, read.http.port, read.http.api_keys) == ("0.0.0.0", 9000, ("a", "b"))
    assert not read.engine.mmap
    assert {name: (str(a.path), a.scale) for name, a in read.adapters.items()} == {
        "one": ("x/one.gguf", 1.0),
        "two": ("two.gguf", 0.5),
    }
    assert {"-cb", "-fa", "--metrics", "--mlock", "--seed", "--device"} <= set(options.ignored)


def test_adapters_keep_the_order_given_and_only_lora_sets_a_default_scale():
    read = config("--lora", "b.gguf,c", "--adapter", "a=path=with=signs", "--lora-scaled", "d.gguf:0.25,e:2")
    assert [(name, a.scale) for name, a in read.adapters.items()] == [
        ("b", 1.0),
        ("c", 1.0),
        ("a", 0.0),
        ("d", 0.25),
        ("e", 2.0),
    ]
    assert read.adapters["a"].path == Path("path=with=signs")


def test_lora_init_without_apply_registers_at_scale_zero():
    assert config("--lora", "b.gguf", "--lora-init-without-apply").adapters["b"].scale == 0


def test_adapters_of_the_same_file_name_get_names_of_their_own():
    read = config("--lora", "x/lora.gguf", "--lora", "y/lora.gguf", "--lora", "my lora (v2).gguf")
    assert list(read.adapters) == ["lora", "lora-2", "my-lora-v2"]


def test_options_override_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: file.gguf\nadapters: {a: x, b: {path: y, scale: 1}}\nhttp: {port: 1, host: '::1'}")
    read, _ = config_from_arguments(["--config", str(file), "--port", "2", "--adapter", "a=z", "--adapter", "c=w"])
    assert read.model == tmp_path / "file.gguf"
    assert (read.http.port, read.http.host) == (2, "::1")
    assert [(name, str(a.path)) for name, a in read.adapters.items()] == [
        ("a", "z"),
        ("b", f"{tmp_path}/y"),
        ("c", "w"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temp", "0.5"], "llama-server's --temp is not supported: give it in the request instead"),
        (["-n", "128"], "llama-server's -n is not supported: give it in the request instead"),
        (["-hf", "user/model"], "llama-server's -hf is not supported: download the file and give it with --model"),
        (["--embeddings"], "llama-server's --embeddings is not supported: this server does not have it"),
        (["--cache-type-k", "q8_0"], "llama-server's --cache-type-k is not supported"),
        (["--adapter", "pirate"], "--adapter takes NAME=PATH, not 'pirate'"),
        (["--lora-scaled", "x.gguf"], "--lora-scaled takes FNAME:SCALE,..., not 'x.gguf'"),
        (["--lora-scaled", "x.gguf:big"], "--lora-scaled takes FNAME:SCALE,..., not 'x.gguf:big'"),
        (["--adaptor", "a=b"], "unknown argument '--adaptor'; did you mean --adapter?"),
        (["--prot", "8081"], "unknown argument '--prot'; did you mean --port?"),
        (["--log-jsonll"], "unknown argument '--log-jsonll'; did you mean --log-jsonl?"),
        (["-td", "2"], "unknown argument '-td'; did you mean -t"),
        (["--spec-draft-n-max", "2"], "llama-server's --spec-draft-n-max is not supported: there is one model"),
        (["--host", "127.0.0.1,::1"], "--host takes one address"),
        (["model.gguf"], "unexpected 'model.gguf': every value follows its option, as in --model FILE"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(capsys, arguments, message):
    assert f"error: {message}" in usage_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "command line: --port: should be less than or equal to 65535 (got '99999')"),
        (["-np", "0"], "command line: --parallel: should be greater than or equal to 1 (got '0')"),
        (["-t", "two"], "command line: --threads: should be a valid integer"),
        (["--cache-ram", "-1"], "command line: --cache-ram: should be a size such as"),
        (["--lora-scaled", "x:nan"], "command line: adapters.x.scale: should be a finite number"),
        (["--adapter", "a=b", "--adapter", "a=c"], "--adapter: the name 'a' is given twice"),
    ],
)
def test_values_out_of_range_name_the_option(arguments, message):
    with pytest.raises(ConfigError) as caught:
        config(*arguments)
    assert str(caught.value).startswith(message)


def test_a_missing_model_says_how_to_give_one(capsys):
    assert main(["serve"]) == 2
    assert "no base model: give --model FILE" in capsys.readouterr().err


def test_a_model_file_that_does_not_exist_is_one_line(capsys):
    assert main(["serve", "-m", "/nowhere/base.gguf"]) == 1
    assert capsys.readouterr().err == "error: the model file /nowhere/base.gguf does not exist\n"


@pytest.mark.parametrize(("name", "reason"), [("nope", "does not exist"), ("tiny.gguf", "is not one")])
def test_an_adapter_root_that_is_no_folder_ends_the_start_in_one_line(tmp_path, capsys, name, reason):
    base = make_tiny_llama(tmp_path / "tiny.gguf")
    assert main(["serve", "-m", str(base), "--upload-dir", str(tmp_path), "--adapter-root", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err == f"error: --adapter-root: the folder {tmp_path / name} {reason}\n"


def test_the_version_and_the_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"loraproxy {__version__}\n"
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'sevre'; did you mean 'serve'?\n"


def test_the_schema_is_json_and_describes_every_section(capsys):
    assert main(["config-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "adapters", "http", "engine"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    short, long = schema["$defs"]["AdapterConfig"]["anyOf"]
    assert (short["type"], long["type"]) == ("string", "object")


def test_serve_help_lists_our_options_but_not_the_ignored_ones(capsys):
    with pytest.raises(SystemExit):
        config_from_arguments(["--help"])
    text = capsys.readouterr().out
    assert "--adapter" in text
    assert "--numa" not in text


def test_a_reader_that_has_seen_enough_gets_no_traceback_from_us():
    command = [sys.executable, "-m", "loraproxy", "config-schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
