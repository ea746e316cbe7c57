from steptime._program.formats.chakra.reader import FORMAT

__all__ = ["FORMAT"]
