from steptime._program.formats.execution.reader import FORMAT

__all__ = ["FORMAT"]
