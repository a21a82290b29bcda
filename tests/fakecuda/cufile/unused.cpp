// Entry points that KvikIO wants to find when it is loaded and that nothing here calls.
#define FAKE_UNUSED(name) extern "C" __attribute__((visibility("default"))) int name() { return 5038; }

FAKE_UNUSED(cuFileWrite)
FAKE_UNUSED(cuFileDriverGetProperties)
FAKE_UNUSED(cuFileDriverSetPollMode)
FAKE_UNUSED(cuFileDriverSetMaxCacheSize)
FAKE_UNUSED(cuFileDriverSetMaxPinnedMemSize)
FAKE_UNUSED(cuFileBatchIOSetUp)
FAKE_UNUSED(cuFileBatchIOSubmit)
FAKE_UNUSED(cuFileBatchIOGetStatus)
FAKE_UNUSED(cuFileBatchIOCancel)
FAKE_UNUSED(cuFileBatchIODestroy)
FAKE_UNUSED(cuFileReadAsync)
FAKE_UNUSED(cuFileWriteAsync)
FAKE_UNUSED(cuFileStreamRegister)
FAKE_UNUSED(cuFileStreamDeregister)
