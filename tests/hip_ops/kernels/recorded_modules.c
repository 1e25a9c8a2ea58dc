/* SPDX-License-Identifier: Apache-2.0
 * The functions of HIP's runtime that launch code objects, for tests: what they are given goes to a function of the test.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *image;
    uint64_t size;
} Module;

typedef struct {
    Module *module;
    const char *name;
} Function;

typedef struct {
    const char *image, *name, *arguments;
    uint64_t image_size, arguments_size, stream;
    unsigned grid[3], block[3], shared;
} Launch;

static int (*launched)(const Launch *);
static int load_code, last_error;

void test_set(int (*function)(const Launch *), int code) {
    launched = function;
    load_code = code;
}

/* HIP 7 keeps the last error until it is read. */
static int failed(int code) {
    if (code) last_error = code;
    return code;
}

int test_last_error(void) { return last_error; }

int hipGetLastError(void) {
    int code = last_error;
    last_error = 0;
    return code;
}

const char *hipGetErrorString(int code) { return code == 209 ? "hipErrorNoBinaryForGpu" : "another error"; }

/* An ELF file's size: its section headers lie at the end. */
static uint64_t size_of(const char *image) {
    uint64_t headers;
    uint16_t header_size, count;
    memcpy(&headers, image + 0x28, 8);
    memcpy(&header_size, image + 0x3a, 2);
    memcpy(&count, image + 0x3c, 2);
    return headers + (uint64_t)header_size * count;
}

int hipModuleLoadData(Module **module, const char *image) {
    if (load_code) return failed(load_code);
    *module = malloc(sizeof(Module));
    (*module)->size = size_of(image);
    (*module)->image = malloc((*module)->size);
    memcpy((*module)->image, image, (*module)->size);
    return 0;
}

int hipModuleGetFunction(Function **function, Module *module, const char *name) {
    *function = malloc(sizeof(Function));
    (*function)->module = module;
    (*function)->name = strdup(name);
    return 0;
}

int hipModuleLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                          void **extra) {
    /* HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END */
    if (parameters || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3) return 1;
    Launch launch = {function->module->image,   function->name,           extra[1],
                     function->module->size,    *(uint64_t *)extra[3],    (uint64_t)stream,
                     {grid_x, grid_y, grid_z},  {block_x, block_y, block_z}, shared};
    return failed(launched(&launch));
}
