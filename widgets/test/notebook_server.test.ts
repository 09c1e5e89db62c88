import assert from "node:assert/strict";
import { test } from "node:test";
import { interruptKernel, server } from "../src/notebook_server.ts";
import { page } from "./page.ts";

const config = (told: unknown): string => `<script id="jupyter-config-data" type="application/json">${JSON.stringify(told)}</script>`;

/** Replace fetch. Returns the recorded calls. */
function answered(status: number): { url: string; init: RequestInit }[] {
  const calls: { url: string; init: RequestInit }[] = [];
  globalThis.fetch = ((url: string, init: RequestInit) => {
    calls.push({ url, init });
    return Promise.resolve(new Response(null, { status }));
  }) as typeof fetch;
  return calls;
}

test("the interrupt goes to the page's own server with token and cookie", async () => {
  const dom = page(config({ baseUrl: "/user/me/", token: "t0" }));
  dom.window.document.cookie = "_xsrf=2%7Cab";
  const calls = answered(204);
  assert.equal((await interruptKernel("7f1c-22")).ok, true);
  assert.equal(calls[0]?.url, "/user/me/api/kernels/7f1c-22/interrupt");
  assert.deepEqual(calls[0]?.init.headers, { "X-XSRFToken": "2|ab", Authorization: "token t0" });
  assert.equal(calls[0]?.init.method, "POST");
});

test("no server, another machine's server or an odd id: told, and nothing is sent", async () => {
  const calls = answered(204);
  const good = config({ baseUrl: "/" });
  for (const [html, id] of [["", "k"], [good, null], [good, "../contents"], [config({ baseUrl: "https://evil.example/" }), "k"]] as const) {
    page(html);
    assert.equal((await interruptKernel(id)).ok, false);
  }
  page(`<script id="jupyter-config-data">{not json</script>`);
  assert.equal(server(), null);
  assert.equal(calls.length, 0);
});

test("a refusal is told with its number", async () => {
  page(config({ baseUrl: "/" }));
  answered(403);
  const answer = await interruptKernel("k");
  assert.equal(answer.ok, false);
  assert.match(answer.text, /403/);
});
