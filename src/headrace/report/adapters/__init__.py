"""Other people's loggers, fed with event lines. Each is imported only when `run --log NAME` asks for it."""
