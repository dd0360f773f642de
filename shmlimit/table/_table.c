int shmlimit_abi(void) { return 1; }
