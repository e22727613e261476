"""The engine as the server sees it: starts the process, sends requests, replays them after a crash. No torch."""
