"""`steptime adopt`: a box with GPUs becomes a platform; measured, fitted and scored in one command."""
