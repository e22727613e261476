"""The command line: one file per noun, a client of the API through the SDK.

`serve`, `demo`, `db`, `plan` and `doctor` alone aren't clients. Heavy things are imported where
they are used, so that ``loraserve --help`` answers at once.
"""
