"""Which model a deployment serves: built-in ones made ready on this machine, or any local folder."""
