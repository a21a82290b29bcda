// Entry points that KvikIO wants to find when it is loaded and that nothing here calls.
#define FAKE_UNUSED(name) extern "C" __attribute__((visibility("default"))) int name() { return 801; }

FAKE_UNUSED(cuMemcpyAsync)
FAKE_UNUSED(cuCtxCreate_v4)
FAKE_UNUSED(cuCtxDestroy_v2)
FAKE_UNUSED(cuLaunchHostFunc)
FAKE_UNUSED(cuMemcpyBatchAsync_v2)
