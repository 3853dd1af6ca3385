// libcuda.so.1 for a machine without a driver, as far as cuDNN asks it when it builds a plan for a GPU that is
// elsewhere: it takes the kernel that was compiled, and finds it in what it took. All else answers that there is no
// driver.
namespace {

constexpr int kNoDriver = 34;  // CUDA_ERROR_STUB_LIBRARY

int found(void** handle) {
  static int something = 0;
  *handle = &something;
  return 0;
}

}  // namespace

extern "C" {
int cuLibraryLoadData(void** library) { return found(library); }
int cuLibraryGetKernel(void** kernel) { return found(kernel); }
int cuLibraryUnload() { return 0; }
int cuGetErrorString(int, const char** text) {
  *text = "no driver";
  return 0;
}

#define ESPALIER_ABSENT(name) \
  int name() { return kNoDriver; }
ESPALIER_ABSENT(cuInit)
ESPALIER_ABSENT(cuDeviceGetCount)
ESPALIER_ABSENT(cuCtxGetCurrent)
ESPALIER_ABSENT(cuCtxGetLimit)
ESPALIER_ABSENT(cuCtxPopCurrent)
ESPALIER_ABSENT(cuCtxPushCurrent)
ESPALIER_ABSENT(cuDeviceGet)
ESPALIER_ABSENT(cuDriverGetVersion)
ESPALIER_ABSENT(cuGetErrorName)
ESPALIER_ABSENT(cuKernelGetAttribute)
ESPALIER_ABSENT(cuKernelSetAttribute)
ESPALIER_ABSENT(cuLaunchCooperativeKernel)
ESPALIER_ABSENT(cuLaunchKernel)
ESPALIER_ABSENT(cuLaunchKernelEx)
ESPALIER_ABSENT(cuLibraryLoadFromFile)
ESPALIER_ABSENT(cuLinkAddData)
ESPALIER_ABSENT(cuLinkComplete)
ESPALIER_ABSENT(cuLinkCreate)
ESPALIER_ABSENT(cuLinkDestroy)
ESPALIER_ABSENT(cuOccupancyMaxPotentialClusterSize)
ESPALIER_ABSENT(cuStreamGetCtx)
}
