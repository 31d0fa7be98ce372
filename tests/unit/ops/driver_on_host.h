// The functions of the CUDA driver that `nvrtc.DriverModule` calls, with their C signatures (cuda.h), for kernels that
// are compiled for the host. Handles do not fit into 32 bits, and a wrong call returns an error.

enum { DRIVER_SUCCESS = 0, DRIVER_INVALID_VALUE = 1, DRIVER_INVALID_CONTEXT = 201, DRIVER_NOT_FOUND = 500 };

static void* const driver_context = (void*)0x7000000000001000;
static void* const driver_module = (void*)0x7000000000002000;
static std::vector<void*> driver_contexts;
static std::vector<const char*> driver_functions;
static void* driver_last_stream;

extern "C" {

int launch(const char* name, int blocks, int rows, int threads, void** arguments);

int driver_depth() { return (int)driver_contexts.size(); }
void* driver_stream() { return driver_last_stream; }

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal + 40;
    return ordinal == 3 ? DRIVER_SUCCESS : DRIVER_INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = driver_context;
    return device == 43 ? DRIVER_SUCCESS : DRIVER_INVALID_VALUE;
}

int cuCtxPushCurrent_v2(void* context) {
    driver_contexts.push_back(context);
    return context == driver_context ? DRIVER_SUCCESS : DRIVER_INVALID_CONTEXT;
}

int cuCtxPopCurrent_v2(void** context) {
    *context = driver_contexts.back();
    driver_contexts.pop_back();
    return DRIVER_SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
    *module = driver_module;
    if (driver_contexts.empty()) return DRIVER_INVALID_CONTEXT;
    return memcmp(image, "\x7f" "ELF\0image", 10) ? DRIVER_INVALID_VALUE : DRIVER_SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    if (driver_contexts.empty()) return DRIVER_INVALID_CONTEXT;
    if (module != driver_module) return DRIVER_INVALID_VALUE;
    if (!strcmp(name, "missing")) return DRIVER_NOT_FOUND;
    driver_functions.push_back(strdup(name));
    *function = (void*)(0x7000000000003000 + driver_functions.size() - 1);
    return DRIVER_SUCCESS;
}

int cuLaunchKernel(
    void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_nbytes, void* stream, void** arguments, void** extra) {
    if (driver_contexts.empty()) return DRIVER_INVALID_CONTEXT;
    size_t place = (size_t)function - 0x7000000000003000;
    if (place >= driver_functions.size() || shared_nbytes || extra) return DRIVER_INVALID_VALUE;
    if (grid_z != 1 || block_y != 1 || block_z != 1) return DRIVER_INVALID_VALUE;
    driver_last_stream = stream;
    return launch(driver_functions[place], grid_x, grid_y, block_x, arguments) ? DRIVER_SUCCESS : DRIVER_NOT_FOUND;
}

int cuGetErrorString(int error, const char** words) {
    *words = error == DRIVER_NOT_FOUND ? "named symbol not found" : "invalid argument";
    return DRIVER_SUCCESS;
}
}
