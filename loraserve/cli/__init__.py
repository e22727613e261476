"""The command line: one file per noun, a client of the API through the SDK, save `serve`, `demo`,
`db`, `plan` and `doctor`.

Heavy things are imported where they are used, so that ``loraserve --help`` answers at once.
"""
