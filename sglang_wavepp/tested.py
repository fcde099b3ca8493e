"""SGLang versions that WavePP was tested with: source fingerprints of the functions it hooks or depends on."""

TESTED: dict[str, dict[str, str]] = {
}
