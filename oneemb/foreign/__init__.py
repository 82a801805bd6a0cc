"""Readers and writers of tables of other libraries: OneFlow, dynamicemb, TFRA, HugeCTR, torch and TorchRec."""
