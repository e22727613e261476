"""What a server will need and what it will have room for, said before it is started: from headers alone, without torch, by the rules that the engine itself goes by."""
