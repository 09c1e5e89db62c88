/* The part of libnvidia-ml.so.1 that nbdist, DeepSpeed and torch use, for GPUs that do not exist.

   The file named by FAKE_NVML has a line for each GPU, and is read at each nvmlInit:
   UUID,free GiB[,UUID of a MIG instance] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, MOST = 8 };
typedef struct { char uuid[96], instance[96]; unsigned long long free_bytes; } Gpu;
typedef struct { unsigned long long total, free, used; } Memory;

static Gpu gpus[MOST];
static unsigned count;
static int opened;

int fake_nvml_opened(void) { return opened; }

int nvmlInitWithFlags(unsigned flags) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char line[256];
    for (count = 0; count < MOST && fgets(line, sizeof line, file); count++) {
        unsigned long long gib = 0;
        gpus[count].instance[0] = 0;
        sscanf(line, "%95[^,\n],%llu,%95[^\n]", gpus[count].uuid, &gib, gpus[count].instance);
        gpus[count].free_bytes = gib << 30;
    }
    fclose(file);
    opened++;
    return OK;
}
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return opened ? (opened--, OK) : UNINITIALIZED; }
const char *nvmlErrorString(int error) { return "fake NVML fails"; }

int nvmlDeviceGetCount_v2(unsigned *found) {
    *found = count;
    return opened ? OK : UNINITIALIZED;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!opened) return UNINITIALIZED;
    if (index >= count) return INVALID;
    *handle = gpus[index].uuid;
    return OK;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "%s", (char *)handle);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (unsigned i = 0; i < count; i++)
        for (char *own = gpus[i].uuid; own; own = own == gpus[i].uuid ? gpus[i].instance : NULL)
            if (!strcmp(uuid, own)) {
                *handle = own;
                return OK;
            }
    return NOT_FOUND;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    snprintf(name, size, "NVIDIA %s", strncmp(handle, "MIG-", 4) ? "H100" : "H100 MIG 3g.40gb");
    return OK;
}
int nvmlDeviceGetComputeMode(void *handle, unsigned *mode) {
    *mode = 0;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *running, void *processes) {
    *running = 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    for (unsigned i = 0; i < count; i++)
        if (handle == gpus[i].uuid && index == 0 && gpus[i].instance[0]) {
            *instance = gpus[i].instance;
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    for (unsigned i = 0; i < count; i++)
        if (handle == gpus[i].uuid || handle == gpus[i].instance) {
            memory->total = 80ULL << 30;
            memory->free = gpus[i].free_bytes;
            memory->used = memory->total - memory->free;
            return OK;
        }
    return NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *next) {
    for (unsigned i = 0; i < count; i++)
        if (handle == gpus[i].uuid) {
            *now = *next = gpus[i].instance[0] != 0;
            return OK;
        }
    return NOT_SUPPORTED;
}
