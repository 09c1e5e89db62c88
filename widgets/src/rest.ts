// The notebook server's own interrupt, for a kernel that is too busy to read our messages.
// Only where the page says where its server is: JupyterLab and Notebook, not VS Code or Colab.

import type { Answer } from "./store.ts";

interface Server {
  baseUrl: string;
  token: string;
}

/** Where this page's server is; null where the page does not say. */
export function server(page: Document = document): Server | null {
  const told = page.getElementById("jupyter-config-data")?.textContent;
  if (!told) return null;
  try {
    const { baseUrl, token } = JSON.parse(told) as Record<string, unknown>;
    if (typeof baseUrl !== "string") return null;
    return { baseUrl, token: typeof token === "string" ? token : "" };
  } catch (problem) {
    if (problem instanceof SyntaxError) return null;
    throw problem;
  }
}

/** Interrupt a kernel through its server's REST API; says in words how that went. */
export async function interruptKernel(kernelId: string | null): Promise<Answer> {
  const found = server();
  // An id goes into a URL: letters, digits and hyphens are all that Jupyter gives.
  if (!found || !kernelId || !/^[\w-]{1,64}$/.test(kernelId)) {
    return failed("the kernel is busy and does not answer: use the notebook's own interrupt button");
  }
  const base = new URL(found.baseUrl, document.baseURI);
  if (base.origin !== new URL(document.baseURI).origin) {
    return failed("this page's server is on another machine: use the notebook's own interrupt button");
  }
  const headers: Record<string, string> = { "X-XSRFToken": cookie("_xsrf") };
  if (found.token) headers.Authorization = `token ${found.token}`;
  const path = `${base.pathname.replace(/\/?$/, "/")}api/kernels/${kernelId}/interrupt`;
  try {
    const reply = await fetch(path, { method: "POST", headers, credentials: "same-origin" });
    if (reply.ok) return { ok: true, text: "interrupted through the notebook server" };
    return failed(`the notebook server refused the interrupt (${reply.status})`);
  } catch (problem) {
    if (problem instanceof TypeError) return failed("the notebook server does not answer");
    throw problem;
  }
}

function failed(text: string): Answer {
  return { ok: false, text };
}

function cookie(name: string): string {
  const found = document.cookie.split("; ").find((pair) => pair.startsWith(`${name}=`));
  return found ? decodeURIComponent(found.slice(name.length + 1)) : "";
}
