from pathlib import Path

import pytest

from loraproxy.config import Config, ConfigError, PoolConfig
from loraproxy.config_file import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "loraproxy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fault(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    return str(caught.value).replace(f"{folder}/", "")


BOMB = "alias: " + "&a0 [x, x, x, x, x, x, x, x, x]"
for level in range(9):
    BOMB = BOMB.replace("alias: ", f"alias: &a{level + 1} [") + f", {', '.join([f'*a{level}'] * 8)}]"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(path):
    config = load_config(path)
    assert config.model is not None
    assert config.adapters["pirate"].path == CONFIGS.resolve() / "adapters/pirate"


def test_the_game_server_example_shows_every_key_and_marks_what_is_not_the_default():
    text = (CONFIGS / "game-server.yaml").read_text()
    config = load_config(CONFIGS / "game-server.yaml")
    for name, section in (("http", config.http), ("pool", config.pool), ("engine", config.engine)):
        assert type(section).model_fields.keys() - {"api_key_file"} <= section.model_fields_set, name
        default = type(section)()
        changed = {key for key in type(section).model_fields if getattr(section, key) != getattr(default, key)}
        marked = {line.split(":")[0].strip() for line in text.splitlines() if "# <-" in line}
        assert changed <= marked, name


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "")) == Config()


def test_paths_are_relative_to_the_file(tmp_path):
    config = load_config(write(tmp_path, "model: a.gguf\nadapters: {x: b}\nhttp: {api_key_file: /k}"))
    assert config.model == tmp_path / "a.gguf"
    assert config.adapters["x"].path == tmp_path / "b"
    assert config.http.api_key_file == Path("/k")
    config = load_config(write(tmp_path, "adapters_dir: d\nadapter_roots: [a, /b]\nupload_dir: ~/u"))
    assert (config.adapters_dir, config.adapter_roots) == (tmp_path / "d", (tmp_path / "a", Path("/b")))
    assert config.upload_dir == Path.home() / "u"


def test_with_ollama_the_model_is_a_name_there(tmp_path):
    config = load_config(write(tmp_path, "model: llama3.2:1b\nbackend: {kind: ollama}"))
    assert (str(config.model), config.backend.urls) == ("llama3.2:1b", ())
    assert "ollama takes one url" in fault(tmp_path, "backend: {kind: ollama, urls: [http://a:1, http://b:1]}")
    assert "bin, args and api_key are for llama-server" in fault(tmp_path, "backend: {kind: ollama, bin: x}")
    assert "should be a URL such as" in fault(tmp_path, "backend: {kind: ollama, urls: ['localhost:11434']}")


def test_the_pools_keys(tmp_path):
    config = load_config(write(tmp_path, "pool: {max_workers: 2, memory_budget: 3G, idle_timeout: 1h, preload: [a]}"))
    assert config.pool == PoolConfig(max_workers=2, memory_budget=3 * 1024**3, idle_timeout=3600, preload=("a",))
    assert "pool.max_workers: should be greater than or equal to 1" in fault(tmp_path, "pool: {max_workers: 0}")


def test_sizes_and_durations_have_units(tmp_path):
    config = load_config(write(tmp_path, "http: {max_body: 1.5KiB, drain_timeout: 2m}\nengine: {cache_ram: 1G}"))
    assert config.http.max_body == 1536
    assert config.http.drain_timeout == 120
    assert config.engine.cache_ram == 1024**3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "loraproxy.yaml: unknown key 'modle'; did you mean 'model'?"),
        ("port: 1", "loraproxy.yaml: unknown key 'port'; did you mean 'http.port'?"),
        ("http: {prot: 1}", "loraproxy.yaml: unknown key 'http.prot'; did you mean 'http.port'?"),
        ("http: {max-queue: 1}", "loraproxy.yaml: unknown key 'http.max-queue'; did you mean 'http.max_queue'?"),
        (
            "adapters: {a: {path: x, scales: 1}}",
            "loraproxy.yaml: unknown key 'adapters.a.scales'; did you mean 'adapters.a.scale'?",
        ),
        ("http: {port: 65536}", "loraproxy.yaml: http.port: should be less than or equal to 65535 (got 65536)"),
        ("engine: {parallel: 0}", "loraproxy.yaml: engine.parallel: should be greater than or equal to 1 (got 0)"),
        (
            "http: {max_body: 3x}",
            "loraproxy.yaml: http.max_body: should be a size such as 1048576, 512KiB or 32MiB (got '3x')",
        ),
        (
            "http: {drain_timeout: soon}",
            "loraproxy.yaml: http.drain_timeout: should be a duration such as 30, 30s or 2m (got 'soon')",
        ),
        (
            "adapters: {a: {path: x, scale: .nan}}",
            "loraproxy.yaml: adapters.a.scale: should be a finite number (got nan)",
        ),
        ("adapters: {a: x, a: y}", "loraproxy.yaml, line 1: not valid YAML: the key 'a' is given twice"),
        ("- model", "loraproxy.yaml: should be a mapping of keys to values, not a list"),
        ("adapters: [a]", "loraproxy.yaml: adapters: should be a mapping, `NAME: value` for each (got ['a'])"),
        ("adapters: {a: {scale: 1}}", "loraproxy.yaml: adapters.a.path: is missing (got {'scale': 1})"),
        ("http: 8080", "loraproxy.yaml: http: should be a mapping of keys to values (got 8080)"),
        ("http: {api_keys: key}", "loraproxy.yaml: http.api_keys: should be a list, such as [one, two]"),
        ("model: [", "loraproxy.yaml, line 1: not valid YAML: "),
        ("{[a]: b}", "loraproxy.yaml, line 1: not valid YAML: a key must be a word"),
        ("? {a: 1}\n: b", "loraproxy.yaml, line 1: not valid YAML: a key must be a word"),
        ("[" * 3000, "loraproxy.yaml: not valid YAML: nested too deeply"),
        ("alias: 2020-13-45", "loraproxy.yaml: not valid YAML: month must be in 1..12"),
        ("alias: !!python/object/apply:os.getcwd []", "loraproxy.yaml, line 1: not valid YAML: could not determine"),
        ("alias: &a [*a]", "loraproxy.yaml: alias: should be a valid string (got [[[[[[[...]]]]]]])"),
        (BOMB, "loraproxy.yaml: alias: should be a valid string (got [[[[[[[...], [...], [...], "),
        ("engine: {parallel: 1" + "0" * 4000 + "}", "loraproxy.yaml: engine.parallel: should be less than or equal to"),
    ],
)
def test_a_fault_names_its_place_and_what_would_be_right(tmp_path, text, message):
    assert fault(tmp_path, text).startswith(message)


def test_a_key_that_resembles_nothing_is_answered_with_the_known_ones(tmp_path):
    assert "known here: path, scale" in fault(tmp_path, "adapters: {a: {path: x, zzzzz: 1}}")


def test_a_fault_in_a_secret_does_not_show_it(tmp_path):
    assert "12345" not in fault(tmp_path, "http: {api_keys: [12345]}")


def test_every_fault_is_reported_at_once(tmp_path):
    assert len(fault(tmp_path, "modle: x\nhttp: {port: -1, prot: 2}").splitlines()) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*missing.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")
