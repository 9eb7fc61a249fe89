"""The script that generates tokens with an adapted decoder. `generate.py` is copied to the folder of the packages."""
