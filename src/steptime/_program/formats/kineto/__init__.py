from steptime._program.formats.kineto.reader import FORMAT

__all__ = ["FORMAT"]
