"""The base model and its vocabulary: a thin, typed face of llama.cpp through llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import llama_cpp

from loraproxy.errors import InvalidRequest


class ModelLoadError(RuntimeError):
    """The base model cannot be loaded; the message names the file and what llama.cpp said."""


def _text_of(call: object, *args: object) -> str:
    """Call a llama.cpp function that fills a text buffer and returns the length; "" on failure."""
    buffer = ctypes.create_string_buffer(65536)
    length = call(*args, buffer, len(buffer))  # type: ignore[operator]
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""


class Model:
    """A loaded base model. Owns the ``llama_model``; ``close()`` frees it."""

    def __init__(
        self, path: Path, *, alias: str = "", gpu_layers: int = 0, use_mmap: bool = True, use_extra_bufts: bool = False
    ) -> None:
        """Load ``path``, a GGUF file. Raises ModelLoadError."""
        self.path = path
        self.alias = alias or path.name
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = use_extra_bufts
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file")
        handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not handle:
            raise ModelLoadError(f"{path}: llama.cpp cannot load this file as a model (is it a complete GGUF model?)")
        self.handle = handle
        self._vocab = llama_cpp.llama_model_get_vocab(handle)
        self._describe()
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self._eog: dict[int, bool] = {}

    def _describe(self) -> None:
        vocab = self._vocab
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self.handle)
        self.n_embd: int = llama_cpp.llama_model_n_embd(self.handle)
        self.n_layer: int = llama_cpp.llama_model_n_layer(self.handle)
        self.n_params: int = llama_cpp.llama_model_n_params(self.handle)
        self.size: int = llama_cpp.llama_model_size(self.handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.vocab_type: int = llama_cpp.llama_vocab_type(vocab)
        self.bos: int = llama_cpp.llama_vocab_bos(vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(vocab)
        self.add_bos: bool = bool(llama_cpp.llama_vocab_get_add_bos(vocab))
        self.bos_text = self._token_text(self.bos)
        self.eos_text = self._token_text(self.eos)
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self.description = _text_of(llama_cpp.llama_model_desc, self.handle)
        self.ftype = self._ftype()
        self.recurrent = bool(
            llama_cpp.llama_model_is_recurrent(self.handle) or llama_cpp.llama_model_is_hybrid(self.handle)
        )

    def _ftype(self) -> str:
        name = llama_cpp.llama_ftype_name(llama_cpp.llama_model_ftype(self.handle))
        return name.decode() if name else "unknown"

    def _token_text(self, token: int) -> str:
        return llama_cpp.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def vocab(self) -> object:
        """The ``llama_vocab`` pointer, for samplers."""
        return self._vocab

    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar metadata, values as text."""
        return {
            _text_of(llama_cpp.llama_model_meta_key_by_index, self.handle, i): _text_of(
                llama_cpp.llama_model_meta_val_str_by_index, self.handle, i
            )
            for i in range(llama_cpp.llama_model_meta_count(self.handle))
        }

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``. ``add_special``: add BOS (and EOS) where the model wants them;
        ``parse_special``: special tokens written in the text become themselves.
        """
        data = text.encode("utf-8", "surrogatepass")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest("the text has a lone surrogate, which is not valid Unicode") from None
        capacity = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * capacity)()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, capacity, add_special, parse_special)
            if n >= 0:
                return list(buffer[:n])
            capacity = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; a special token is empty unless ``special``."""
        known = self._pieces[special]
        if token in known:
            return known[token]
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                break
            size = -n
        result = known[token] = buffer.raw[:n]
        return result

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special tokens rendered, incomplete UTF-8 replaced."""
        return b"".join(self.piece(t, special=True) for t in tokens).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation (EOS, EOT, ...)."""
        if token not in self._eog:
            self._eog[token] = bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))
        return self._eog[token]

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return tuple(t for t in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(self._vocab, t))

    def close(self) -> None:
        """Free the model; contexts of it must be gone."""
        if self.handle:
            llama_cpp.llama_model_free(self.handle)
            self.handle = None
