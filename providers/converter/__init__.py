"""The checkpoint converter: for another tensor-parallel size, or to one file of weights."""

from runtime_di.providers.converter.protocol import Converter
from runtime_di.providers.converter.service import open_converter
from runtime_di.providers.converter.settings import ConversionSettings
from runtime_di.providers.converter.tokenizer_files import TokenizerFiles, tokenizer_files

__all__ = [
    "ConversionSettings",
    "Converter",
    "TokenizerFiles",
    "open_converter",
    "tokenizer_files",
]
